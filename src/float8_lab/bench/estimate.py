"""Estimates of the speed-ups of layers that were not measured here, from those that were.

A layer gains at least what a smaller one gains. So its estimate is the speed-up of the largest
layer measured on that GPU that has no more tokens and features; there is none where that one loses
itself. On an H200 it was no higher than
the measurement for each of the 145 sizes when that size itself was left out, but for block scales,
where it was up to 9 % too high.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from float8_lab.bench.shapes import Shape
from float8_lab.bench.variants import EAGER, HIGH_PRECISION

FILES = {"H100": "h100-linear-eager.json", "H200": "h200-smallest-layers.json"}
"""The results of each GPU, in `benchmarks/results/`."""

STORED = Path(__file__).with_name("estimates.json")
"""The values that `packed` returns, where no results files are; by `float8 bench tables`."""

Speedups = Mapping[Shape, float]


def measured(results: Mapping[str, Any], recipe: str, mode: str) -> dict[Shape, float]:
    """Return the speed-up over bf16 of each layer in a results file of `float8 bench linear`."""
    return {
        Shape(row["M"], row["K"], row["N"]): row["speedup"]
        for row in results["rows"]
        if (row["recipe"], row["mode"]) == (recipe, mode) and row["K"] and "speedup" in row
    }


def packed(folder: Path) -> str:
    """Return, as JSON, the speed-ups in eager mode of all results files of `folder`.

    By GPU: `recipes`, and a row `[M, K, N, *speedups]` for each layer.
    """
    gpus = []
    for gpu, name in FILES.items():
        results = json.loads((folder / name).read_text())
        recipes = [*dict.fromkeys(row["recipe"] for row in results["rows"])]
        recipes.remove(HIGH_PRECISION)
        columns = [measured(results, recipe, EAGER) for recipe in recipes]
        rows = [[*shape, *(round(each[shape], 3) for each in columns)] for shape in columns[0]]
        lines = ",\n  ".join(map(json.dumps, rows))
        gpus.append(f'"{gpu}": {{"recipes": {json.dumps(recipes)}, "rows": [\n  {lines}]}}')
    return "{" + ",\n".join(gpus) + "}\n"


def stored(gpu: str, recipe: str) -> Speedups:
    """Return the speed-ups of the layers measured on a GPU, in eager mode; empty if none were."""
    known = json.loads(STORED.read_text()).get(gpu)
    if known is None or recipe not in known["recipes"]:
        return {}
    column = known["recipes"].index(recipe)
    return {Shape(*row[:3]): row[3 + column] for row in known["rows"]}


def estimate(known: Speedups, shape: Shape) -> float | None:
    """Return the estimate for one layer; None: nothing as small was measured, or it loses."""
    smaller = [each for each in known if all(a <= b for a, b in zip(each, shape, strict=True))]
    found = known[max(smaller, key=math.prod)] if smaller else 0.0
    return found if found >= 1.0 else None
