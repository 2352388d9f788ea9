"""Fits the GEMM constants of `src/float8/cost/ceilings.py` to a measured sweep.

    float8 bench matmul --shapes square,llama3-8b,llama2-70b-tp -o matmul.json
    python benchmarks/fit_ceilings.py matmul.json --start h100

Prints the fields to copy and the error of every shape. The least squared logarithms of the errors
decide, so that a small GEMM counts as much as a large one. Float8 with and without fast
accumulation share one rate, fitted to the mean of both.
"""

import argparse
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from float8.cost import KNOWN, Ceilings, gemm_ms

EXPOSED = [n / 20 for n in range(21)]
KERNEL_US = [n / 4 for n in range(25)]
RATE_STEP = 10  # TFLOP/s
# Names in the results, and the fields of `Ceilings`.
VARIANTS = {"bf16": "bf16", "float8": "float8", "float8 fast accum": "float8"}

Shape = tuple[int, int, int]
Times = dict[Shape, float]


def read(results: Path) -> dict[str, Times]:
    """Measured milliseconds of each kind of GEMM, by M, K and N."""
    found: dict[str, dict[Shape, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in json.loads(results.read_text())["rows"]:
        kind = VARIANTS.get(row["variant"])
        if kind is not None and row["K"] is not None:
            found[kind][row["M"], row["K"], row["N"]].append(row["ms"])
    return {
        kind: {shape: fmean(ms) for shape, ms in times.items()} for kind, times in found.items()
    }


def errors(times: Times, kind: str, ceilings: Ceilings) -> list[float]:
    """Logarithm of estimated over measured time."""
    float8 = kind == "float8"
    return [math.log(gemm_ms(*shape, ceilings, float8=float8) / ms) for shape, ms in times.items()]


def fit_rate(times: Times, kind: str, start: Ceilings) -> tuple[float, Ceilings]:
    """The best rate of one kind of GEMM, all else given, and its loss."""
    fastest = max(2 * math.prod(shape) / ms / 1e9 for shape, ms in times.items())
    best = (math.inf, start)
    for step in range(round(0.8 * fastest / RATE_STEP), round(1.3 * fastest / RATE_STEP)):
        rate = float(step * RATE_STEP)
        if kind == "float8":
            tried = replace(start, float8_tflops=rate)
        else:
            tried = replace(start, bf16_tflops=rate)
        loss = sum(error**2 for error in errors(times, kind, tried))
        best = min(best, (loss, tried), key=lambda found: found[0])
    return best


def fit(measured: dict[str, Times], start: Ceilings) -> Ceilings:
    """The best of all `EXPOSED`, `KERNEL_US` and rates."""
    best = (math.inf, start)
    for exposed in EXPOSED:
        for kernel_us in KERNEL_US:
            total, tried = 0.0, replace(start, exposed=exposed, kernel_us=kernel_us)
            for kind, times in measured.items():
                loss, tried = fit_rate(times, kind, tried)
                total += loss
            best = min(best, (total, tried), key=lambda found: found[0])
    return best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="written by float8 bench matmul")
    parser.add_argument("--start", choices=KNOWN, default="h100", help="other fields come from it")
    args = parser.parse_args()
    measured = read(args.results)
    fitted = fit(measured, KNOWN[args.start])
    for field in ("bf16_tflops", "float8_tflops", "exposed", "kernel_us"):
        print(f"    {field}={getattr(fitted, field)},")
    sizes = []
    for kind, times in measured.items():
        for (shape, ms), error in zip(times.items(), errors(times, kind, fitted), strict=True):
            sizes.append(abs(math.expm1(error)))
            name = " x ".join(map(str, shape))
            print(f"{kind:<7} {name:<22} {ms:9.4f} ms  error {math.expm1(error):+7.1%}")
    print(f"worst {max(sizes):.1%}, median {median(sizes):.1%}")


if __name__ == "__main__":
    main()
