"""`float8 bench limits`: from which size on a linear layer gains, per recipe, by GPU times.

Limits are those that cost the least: the sum over all layers of how much slower each one becomes by
what the limits decide for it. Of limits that cost as little, up to noise, those that convert the
fewest layers. Only eager times count: a layer that is compiled alone is cast apart
from what makes its input, as in no model.
"""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from float8.convert.speed import SMALLEST, Smallest
from float8_lab.bench.tables import ROOT, updated
from float8_lab.bench.variants import EAGER, HIGH_PRECISION

TABLE = ROOT / "src" / "float8" / "convert" / "speed.py"
PAGE = ROOT / "docs" / "measuring.md"

_NOISE = 2e-4
"""Of a mean over 145 layers: what three of them that differ by 1 % make."""

Cell = tuple[int, int, float, float]  # tokens, min(K, N), product, log of speedup


class Found(NamedTuple):
    """Limits, and what they decide."""

    limits: Smallest
    loss: float  # mean over all layers of how much more time they take than by the best choice
    right: float  # share of layers that take the least time


def fit(cells: Sequence[Cell]) -> Found:
    """Return limits of the least loss, each of a measured layer; those that convert the fewest."""
    table = torch.tensor(cells, dtype=torch.float64)
    sizes, gains = table[:, :3], table[:, 3]
    rounded = map(_rounded, sizes[:, 2].tolist())
    columns = (*(sorted({*sizes[:, i].tolist()}) for i in (0, 1)), sorted({*rounded}))
    limits = [Smallest(int(M), int(F), product) for M, F, product in itertools.product(*columns)]
    large = (sizes >= torch.tensor(limits, dtype=torch.float64).unsqueeze(1)).all(-1)
    losses = torch.where(large, -gains, gains).clamp(min=0)  # [limits, cells]
    means = losses.mean(1)
    as_good = (means <= means.min() + _NOISE).nonzero().flatten().tolist()
    best = min(as_good, key=large.sum(1).tolist().__getitem__)
    return Found(limits[best], means[best].item(), (losses[best] == 0).double().mean().item())


def _rounded(product: float) -> float:
    """Down to two digits."""
    size = 10 ** (math.floor(math.log10(product)) - 1)
    return float(math.floor(product / size) * size)


def fit_results(results: dict[str, Any]) -> tuple[str, dict[str, Found]]:
    """Return the GPU of a results file, and limits by recipe."""
    gpu = re.search(r"\b[A-Z]+\d+\b", results["environment"]["device"])
    if gpu is None:
        raise ValueError(f"device: got {results['environment']['device']!r}, expected a GPU")
    size, bf16 = ("M", "K", "N"), {}
    cells: dict[str, list[Cell]] = {}
    for row in results["rows"]:  # of each size, bf16 comes first
        if row["K"] is None or row["mode"] != EAGER:  # a sum, or compiled
            continue
        key = tuple(row[name] for name in size)
        if row["recipe"] == HIGH_PRECISION:
            bf16[key] = row["ms"]
        else:
            M, K, N = key
            gain = math.log(bf16[key] / row["ms"])
            cells.setdefault(row["recipe"], []).append((M, min(K, N), float(M * K * N), gain))
    if not cells:
        raise ValueError("results: got no eager rows, expected those of linear --gpu-time")
    return gpu[0], {recipe: fit(each) for recipe, each in cells.items()}


def write_limits(gpu: str, found: dict[str, Found]) -> None:
    """Write the limits of this GPU into the library and, for readers, into its page."""
    limits = {recipe: each.limits for recipe, each in found.items()}
    every = SMALLEST | {gpu: SMALLEST.get(gpu, {}) | limits}
    code = ["SMALLEST = {"]
    text = ["", "| GPU | recipe | tokens per forward | K and N | tokens x K x N |"]
    text.append("| --- | --- | --- | --- | --- |")
    for name, recipes in sorted(every.items()):
        code.append(f'    "{name}": {{')
        for recipe, (M, F, product) in recipes.items():
            code.append(f'        "{recipe}": Smallest({M}, {F}, {product / 1e9:g}e9),')
            text.append(f"| {name} | {recipe} | {M} | {F} | {product / 1e9:g}e9 |")
        code.append("    },")
    begin, end = "# begin: written by float8 bench limits", "# end"
    TABLE.write_text(updated(TABLE.read_text(), begin, end, "\n".join([*code, "}\n"])))
    begin, end = "<!-- limits: written by float8 bench limits -->", "<!-- end of limits -->"
    PAGE.write_text(updated(PAGE.read_text(), begin, end, "\n".join([*text, "\n"])))
