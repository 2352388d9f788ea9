"""Speed and memory of models: `float8 bench train --plot`, and the picture at the top of README.md.

`python -m float8_lab.bench.picture` draws the latter from results files. Left: tokens per second
and peak memory of one plain model. Right: losses of runs that differ in nothing but the recipe. The
PNG carries what it shows as text, so that a test can compare it.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from float8_lab.bench.tables import PLAIN, RESULTS, ROOT

PICTURE = ROOT / "docs" / "speed_and_loss.png"
CURVES = "h200-curves-150m.json"
FILES = PLAIN.name, CURVES
SHOWN = "Comment"  # the key of the text within the PNG

_MODEL, _COMMIT, _TOKENS = "8B stack", "ca2477b", 8192  # README's table: its model, run and step
_OTHER = "delayed"  # was another recipe in that run
_NAMES = {
    "bf16": "bfloat16",
    "high_precision": "bfloat16",
    "tensorwise@torchao": "torchao tensorwise",
}
_COLORS = {
    "bfloat16": "#777777",
    "tensorwise": "#0072b2",
    "delayed": "#d55e00",
    "torchao tensorwise": "#009e73",
    "blockwise": "#cc79a7",
}


def shown(folder: Path) -> dict[str, list[Any]]:
    """Return what the picture shows: points of compiled models, and curves of runs of one day.

    A point is recipe, tokens/s and GiB; a curve is its recipe and pairs of step and loss.
    """
    runs = json.loads((folder / PLAIN.name).read_text())["runs"]
    points = [
        [_name(row), round(_TOKENS / row["ms"] * 1e3), round(row["peak_gib"], 2)]
        for run in runs
        if run["environment"]["commit"] == _COMMIT
        for row in run["rows"]
        if (row["what"], row["mode"]) == (_MODEL, "compiled") and row["recipe"] != _OTHER
    ]
    runs = json.loads((folder / CURVES).read_text())["runs"]
    first = runs[0]
    curves = [
        [_name(run), run["train_loss"]]
        for run in runs
        if (run["seed"], run["commit"]) == (first["seed"], first["commit"])
    ]
    return {"points": points, "curves": curves}


def draw(folder: Path, path: Path) -> None:
    """Draw the picture as a PNG."""
    what = shown(folder)
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    _points(left, what["points"], "Faster, in less memory: four blocks of Llama 8B on an H100")
    left.set_xlim(5, 6.75)
    _curves(right, what["curves"])
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={SHOWN: json.dumps(what)})


def plot_results(results: dict[str, Any], path: Path) -> None:
    """Draw the rows of `float8 bench train`: tokens/s of a GPU, and its memory.

    Raises:
        ValueError: they have no memory, as those of a CPU.
    """
    points = [
        [_name(row), row["tokens_per_s_per_gpu"], row["peak_gib"]]
        for row in results["rows"]
        if row.get("peak_gib")
    ]
    if not points:
        raise ValueError("plot: got results without memory, expected those of a GPU")
    figure = Figure(figsize=(7, 4.3), layout="constrained")
    axes = figure.subplots()
    about = results["settings"]
    where = f"{about['ranks']} x {results['environment']['device']}"
    size = f"{about['batch']} x {about['seq_len']} tokens"
    _points(axes, points, f"{about['model']}, {size} per GPU, {where}")
    axes.margins(x=0.4)
    figure.savefig(path, dpi=120)


def _points(axes: Axes, points: list[Any], title: str) -> None:
    slowest = min(tokens for _, tokens, _ in points)
    for name, tokens, gib in points:
        color = _COLORS.get(name, "#009e73" if "torchao" in name else "#0072b2")
        axes.plot(gib, tokens / 1e3, "o", markersize=11, color=color)
        axes.annotate(
            f"{name}  {tokens / slowest:.2f}x",
            (gib, tokens / 1e3),
            (10, -4),
            textcoords="offset points",
        )
    axes.set(
        title=title,
        xlabel="peak memory, GiB (left is better)",
        ylabel="thousand tokens/s (up is better)",
    )
    axes.margins(y=0.12)


def _curves(axes: Axes, curves: list[Any]) -> None:
    for index, (name, losses) in enumerate(curves):
        width = 1.2 + 1.6 * (len(curves) - 1 - index)  # so that all of coinciding ones are seen
        axes.plot(*zip(*losses, strict=True), label=name, color=_COLORS[name], linewidth=width)
    axes.set(
        title="The same loss: a 150m Llama from its first step on",
        xlabel="step",
        ylabel="training loss, nats per byte",
    )
    axes.legend(frameon=False)


def _name(row: dict[str, Any]) -> str:
    recipe: str = row["recipe"]
    return _NAMES.get(recipe, recipe)


if __name__ == "__main__":
    draw(RESULTS, PICTURE)
