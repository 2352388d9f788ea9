"""`float8 bench linear --plot`: speed-ups of single layers by width and tokens, as a heat map."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from float8_lab.bench.estimate import Speedups, measured
from float8_lab.bench.variants import HIGH_PRECISION

_COLUMNS = 3  # panels side by side


def plot_results(results: Mapping[str, Any], path: Path) -> None:
    """Draw a panel per recipe: rows are widths, sqrt(K * N), columns are tokens.

    A cell is the geometric mean of the layers in it, which are nearest to its width. Of several
    modes that with the most layers is drawn.

    Raises:
        ValueError: no recipe was measured beside bf16.
    """
    rows = [row for row in results["rows"] if row.get("K") and "speedup" in row]
    rows = [row for row in rows if row["recipe"] != HIGH_PRECISION]
    if not rows:
        raise ValueError("plot: got results without speed-ups, expected those of a recipe and bf16")
    ((mode, _),) = Counter(row["mode"] for row in rows).most_common(1)
    recipes = [*dict.fromkeys(row["recipe"] for row in rows if row["mode"] == mode)]
    panels = [_cells(measured(results, recipe, mode)) for recipe in recipes]
    tokens = sorted({M for cells in panels for M, _ in cells})
    widths = sorted({width for cells in panels for _, width in cells})
    columns = min(len(recipes), _COLUMNS)
    lines = math.ceil(len(recipes) / columns)
    how: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
    wide, high = max(0.4 + len(tokens) * 0.48, 3), max(0.4 + len(widths) * 0.3, 1.5)
    figure = Figure(figsize=(1.3 + columns * wide, 1.1 + lines * high), layout="constrained")
    axes = [*figure.subplots(lines, columns, **how).flat]
    for each, recipe, cells in zip(axes, recipes, panels, strict=False):
        table = [[cells.get((M, width), math.nan) for M in tokens] for width in widths]
        # Blue is faster, red is slower; white is as fast as bf16.
        shown = each.imshow(
            np.log(table), cmap="RdBu", vmin=-0.6, vmax=0.6, origin="lower", aspect="auto"
        )
        for (y, x), value in np.ndenumerate(table):
            if not math.isnan(value):
                color = "white" if abs(math.log(value)) > 0.38 else "black"
                each.text(x, y, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
        each.set_title(recipe, fontsize=10)
        each.set_xticks(range(len(tokens)), map(str, tokens), fontsize=8)
        each.set_yticks(range(len(widths)), map(str, widths), fontsize=8)
        each.tick_params(length=0, labelbottom=True)
        each.spines[:].set_visible(False)
    for each in axes[len(recipes) :]:
        each.set_axis_off()
    figure.supxlabel("tokens per forward", fontsize=10)
    figure.supylabel("width: sqrt(in features x out features)", fontsize=10)
    scale = figure.colorbar(shown, ax=axes, shrink=0.6)
    ticks = (0.6, 0.8, 1.0, 1.25, 1.6)
    scale.set_ticks([math.log(x) for x in ticks], labels=[f"{x:g}x" for x in ticks])
    time = "GPU time, " if results["settings"].get("gpu_time") else ""
    where = f"{results['environment']['device']}, {time}{mode}"
    title = f"One linear layer, forward + backward, over bf16: {where}"
    figure.suptitle(f"{title}\nblue is faster, red is slower; empty: not measured", fontsize=10)
    figure.savefig(path, dpi=130)


def _cells(speedups: Speedups) -> dict[tuple[int, int], float]:
    """Return geometric means by tokens and width: a power of two, or halfway to the next."""
    found: dict[tuple[int, int], list[float]] = {}
    for (M, K, N), speedup in speedups.items():
        below = 2 ** int(math.log2(K * N) / 2)
        near = [below, below * 3 // 2, below * 2]
        width = min(near, key=lambda each: abs(math.log(each / math.sqrt(K * N))))
        found.setdefault((M, width), []).append(math.log(speedup))
    return {key: math.exp(sum(logs) / len(logs)) for key, logs in found.items()}
