"""Speed-ups of layers that were not measured here: lower bounds, from results files of a checkout.

A layer gains at least what a smaller one gains. So its bound is the speed-up of the largest layer
measured on that GPU that has no more tokens and features. On an H200 it held for each of the 145
sizes when that size itself was left out, but for block scales, where it was up to 9 % too high.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from float8_lab.bench.shapes import Shape
from float8_lab.bench.tables import RESULTS
from float8_lab.bench.variants import EAGER

FILES = {"H100": "h100-linear-eager.json", "H200": "h200-smallest-layers.json"}

Speedups = Mapping[Shape, float]


def measured(results: Mapping[str, Any], recipe: str, mode: str) -> dict[Shape, float]:
    """Return the speed-up over bf16 of each layer in a results file of `float8 bench linear`."""
    return {
        Shape(row["M"], row["K"], row["N"]): row["speedup"]
        for row in results["rows"]
        if (row["recipe"], row["mode"]) == (recipe, mode) and row["K"] and "speedup" in row
    }


def stored(gpu: str, recipe: str) -> dict[Shape, float]:
    """Return what is stored for a GPU, in eager mode; nothing where there is no checkout."""
    path = RESULTS / FILES.get(gpu, "none")
    return measured(json.loads(path.read_text()), recipe, EAGER) if path.is_file() else {}


def at_least(known: Speedups, shape: Shape) -> float | None:
    """Return the bound of one layer; None: nothing as small was measured."""
    smaller = [each for each in known if all(a <= b for a, b in zip(each, shape, strict=True))]
    return known[max(smaller, key=math.prod)] if smaller else None
