"""Results of one command: one file, JSON or CSV, with everything needed to repeat it; a plot."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from float8_lab.bench.shapes import OUTPUT

SCHEMA = 1
_TITLE_WIDTH = 7.0  # inches that the longest title of a plot takes


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write JSON or CSV, by the suffix of `path`; CSV has all but `results["rows"]` as `#` lines.

    Rows are dicts. `environment` says where they were measured, `settings` what was asked for, and
    `extra` is what does not belong to one row.
    """
    # JSON has no infinities: the SQNR of equal results becomes null.
    plain = json.loads(
        json.dumps({"schema": SCHEMA, **results}),
        parse_constant=lambda name: None,
        parse_float=lambda digits: float(f"{float(digits):.6g}"),
    )
    if path.suffix == ".json":
        path.write_text(json.dumps(plain, indent=1, allow_nan=False) + "\n")
        return
    rows = results["rows"]
    with path.open("w", newline="") as file:
        for key, value in plain.items():
            if key != "rows":
                file.write(f"# {key}: {json.dumps(value)}\n")
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def check_output(path: Path) -> None:
    """Refuse a path that results cannot go to, before anything is measured."""
    if path.suffix not in (".json", ".csv"):
        raise ValueError(f"output: got {path.name!r}, expected a name ending in .json or .csv")
    if not path.parent.is_dir():
        raise ValueError(f"output: there is no folder {path.parent}")


def plot_speedups(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw one field per shape and variant, blue above 1 and red below, with its number.

    Each row has `M`, `K`, `N`, `speedup`, `variant` or `recipe` and `mode`, and perhaps `gemm`;
    those of sums over shapes are left out.
    """
    found = {_labels(row): row["speedup"] for row in rows if row["K"] is not None}
    shapes, variants = (list(dict.fromkeys(labels)) for labels in zip(*found, strict=True))
    values = np.array([[found.get((x, y), np.nan) for x in shapes] for y in variants])
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
    figure.suptitle(f"{title}, speedup over bf16", fontsize=10)
    figure.savefig(path, dpi=150)


def _labels(row: dict[str, Any]) -> tuple[str, str]:
    """Of its shape and its variant."""
    shape, gemm = f"{row['M']}\n{row['K']}\n{row['N']}", row.get("gemm", OUTPUT)
    variant = row["variant"] if "variant" in row else f"{row['recipe']}, {row['mode']}"
    return shape if gemm == OUTPUT else f"{shape}\n{gemm}", variant
