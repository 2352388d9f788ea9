"""Writes the table that GEMM kernels are chosen by, from a measured sweep.

    float8 bench matmul --shapes llama3-8b,llama3-70b,llama2-70b-tp --gradients -o kernels.json
    python benchmarks/fit_gemm_choice.py kernels.json          # rewrite src/float8/gemm/h100.json
    python benchmarks/fit_gemm_choice.py kernels.json --check  # exit 1 if that would change it

The table has a line per GEMM that was measured with both kernels, M, K, N, the format of the first
operand and microseconds; a GEMM measured more than once gets the mean. It goes to the file of the
device that the results are of. Prints what will be chosen for each GEMM.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from float8.cost import ceilings_by_device_name
from float8.formats import SHORT_NAME
from float8.gemm import MeasuredGemm, choose_kernel

ROOT = Path(__file__).parent.parent
TABLES = ROOT / "src" / "float8" / "gemm"
# Names in the results.
TENSORWISE, ROWWISE = "float8 fast accum", "float8 fast accum, rowwise kernel"


def gemms(results: dict[str, Any]) -> list[MeasuredGemm]:
    """Every GEMM that was measured with both kernels, in the order of the results."""
    found: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in results["rows"]:
        if row["variant"] in (TENSORWISE, ROWWISE):
            key = tuple(row[name] for name in ("M", "K", "N", "format_a"))
            found[key][row["variant"]].append(row["ms"] * 1e3)
    return [
        MeasuredGemm(*key, *(round(fmean(us[name]), 2) for name in (TENSORWISE, ROWWISE)))
        for key, us in found.items()
        if len(us) == 2
    ]


def table_text(results: dict[str, Any]) -> str:
    """The file: where it was measured, and a line per GEMM."""
    environment = results["environment"]
    names = ("device", "torch", "cuda", "git_commit", "command")
    head = {name: environment[name] for name in names} | {"columns": MeasuredGemm._fields}
    fields = "".join(f' "{name}": {json.dumps(value)},\n' for name, value in head.items())
    lines = ",\n".join(f"  {json.dumps(gemm)}" for gemm in gemms(results))
    return f'{{\n{fields} "gemms": [\n{lines}\n ]\n}}\n'


def table_path(results: dict[str, Any]) -> Path:
    """The file of the device that the results are of."""
    name = results["environment"]["device"]
    ceilings = ceilings_by_device_name(name)
    if ceilings is None:
        raise ValueError(f"no ceilings for {name!r}: add them to float8.cost first")
    return TABLES / f"{ceilings.name}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="written by float8 bench matmul")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    table = gemms(results)
    if not table:
        sys.exit(f"{args.results}: no GEMM was measured with both kernels")
    path, text = table_path(results), table_text(results)
    if args.check:
        if not path.exists() or path.read_text() != text:
            sys.exit(f"{path.name} is not up to date: run this without --check")
        return
    path.write_text(text)
    for gemm in table:
        shape = " x ".join(map(str, gemm[:3]))
        gain = gemm.tensorwise_us / gemm.rowwise_us - 1
        dtype = next(dtype for dtype, name in SHORT_NAME.items() if name == gemm.format_a)
        chosen = choose_kernel(tuple(table), *gemm[:3], dtype_a=dtype).value
        print(f"{shape:<22} {gemm.format_a}  rowwise {gain:+6.1%}  {chosen}")


if __name__ == "__main__":
    main()
