"""Fits the GEMM constants of `src/float8/cost/ceilings.py` to a measured sweep.

    float8 bench matmul --shapes square --shapes llama3-8b -o matmul.json
    python benchmarks/fit_ceilings.py matmul.json --start h100

Prints the fields to copy and the error of every shape. The least squared logarithms of the errors
decide, so that a small GEMM counts as much as a large one.
"""

import argparse
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from float8.cost import KNOWN, Ceilings, gemm_ms

FILLS = range(0, 2001, 50)
KERNEL_US = [n / 2 for n in range(1, 21)]
# Names in the results, and the fields of `Ceilings`.
VARIANTS = {"bf16": "bf16", "float8 fast accum": "float8"}

Row = dict[str, Any]


def errors(rows: list[Row], kind: str, ceilings: Ceilings) -> list[float]:
    """Logarithm of estimated over measured time."""
    float8 = kind == "float8"
    return [
        math.log(gemm_ms(row["M"], row["K"], row["N"], ceilings, float8=float8) / row["ms"])
        for row in rows
    ]


def fit(rows: list[Row], kind: str, start: Ceilings) -> tuple[float, Ceilings]:
    """The best rate and fill of one kind of GEMM for a given time per kernel, and its loss."""
    best = (math.inf, start)
    fastest = max(row["tflops"] for row in rows)
    rates = [fastest * (1 + step / 50) for step in range(-5, 26)]
    for rate, fill in itertools.product(rates, FILLS):
        tried = replace(start, **{f"{kind}_tflops": round(rate, -1), f"{kind}_fill": fill})
        loss = sum(error**2 for error in errors(rows, kind, tried))
        best = min(best, (loss, tried), key=lambda found: found[0])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="written by float8 bench matmul")
    parser.add_argument("--start", choices=KNOWN, default="h100", help="other fields come from it")
    args = parser.parse_args()
    rows = json.loads(args.results.read_text())["rows"]
    groups = {
        kind: [row for row in rows if row["variant"] == variant]
        for variant, kind in VARIANTS.items()
    }
    best = (math.inf, KNOWN[args.start])
    for kernel_us in KERNEL_US:
        total, ceilings = 0.0, replace(KNOWN[args.start], kernel_us=kernel_us)
        for kind, members in groups.items():
            loss, ceilings = fit(members, kind, ceilings)
            total += loss
        best = min(best, (total, ceilings), key=lambda found: found[0])
    _, fitted = best
    for field in ("bf16_tflops", "float8_tflops", "bf16_fill", "float8_fill", "kernel_us"):
        print(f"    {field}={getattr(fitted, field)},")
    for kind, members in groups.items():
        for row, error in zip(members, errors(members, kind, fitted), strict=True):
            shape = f"{row['M']} x {row['K']} x {row['N']}"
            print(f"{kind:<7} {shape:<22} {row['ms']:9.4f} ms  error {math.expm1(error):+7.1%}")


if __name__ == "__main__":
    main()
