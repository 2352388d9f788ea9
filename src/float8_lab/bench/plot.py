"""A heat map of speedups over shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from float8_lab.bench.shapes import OUTPUT

_TITLE_WIDTH = 7.0  # inches that the longest title takes


def plot_speedups(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw one field per shape and variant, blue above 1 and red below, with its number.

    Args:
        rows: Each with `M`, `K`, `N`, `speedup`, `variant` or `recipe` and `mode`, and perhaps
            `gemm`; rows of sums over shapes are left out.
        title: What was measured on what.
        path: Image to write; the format is that of its suffix.
    """
    rows = [row for row in rows if row["K"] is not None]
    shapes = list(dict.fromkeys(_shape(row) for row in rows))
    variants = list(dict.fromkeys(_variant(row) for row in rows))
    values = np.full((len(variants), len(shapes)), np.nan)
    for row in rows:
        values[variants.index(_variant(row)), shapes.index(_shape(row))] = row["speedup"]

    size = (max(2.5 + 0.95 * len(shapes), _TITLE_WIDTH), 1.8 + 0.45 * len(variants))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.imshow(values, cmap="RdBu", norm=TwoSlopeNorm(1.0, 0.0, 2.0), aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "white" if abs(value - 1) > 0.6 else "black"
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(shapes)), shapes, fontsize=8)
    axes.set_yticks(range(len(variants)), variants, fontsize=9)
    axes.set_xlabel("M\nK\nN", fontsize=8)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _shape(row: dict[str, Any]) -> str:
    shape = f"{row['M']}\n{row['K']}\n{row['N']}"
    gemm = row.get("gemm", OUTPUT)
    return shape if gemm == OUTPUT else f"{shape}\n{gemm}"


def _variant(row: dict[str, Any]) -> str:
    return row["variant"] if "variant" in row else f"{row['recipe']}, {row['mode']}"
