"""Loss curves of several runs, and how far each is from high precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from float8_lab.trainer.metrics import Metrics

_COLORS = ("#333333", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREY = "#666666"
_PALE = 0.45


def plot_comparison(runs: dict[str, Metrics], title: str, path: Path) -> None:
    """Draw the loss of every run above its difference to the first one.

    Curves that coincide are all seen: the reference is a wide line below the others, whose dashes
    take turns; its dots are larger than theirs.

    Args:
        runs: Recipe -> record; the first one is the reference, high precision.
        title: What was trained.
        path: Image to write; the format is that of its suffix.
    """
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    (first, reference), *others = runs.items()
    window = max(len(reference.train) // 40, 1)
    wide: dict[str, Any] = {"width": 4.0, "size": 9.0, "pale": True}
    _draw(above, reference, {}, window, color=_COLORS[0], **wide)
    legend = [Line2D([], [], color=_COLORS[0], linewidth=4.0, alpha=_PALE, label=first)]
    for index, (recipe, run) in enumerate(others):
        color = _COLORS[1 + index % (len(_COLORS) - 1)]
        dash = "-" if len(others) == 1 else (6.0 * index, (6.0, 6.0 * (len(others) - 1)))
        size = 6.5 - 3.0 * index / len(others)
        style: dict[str, Any] = {"color": color, "width": 1.6, "size": size, "dash": dash}
        _draw(above, run, {}, window, **style)
        _draw(below, run, _losses(reference), window, **style)
        legend.append(Line2D([], [], color=color, linewidth=1.6, label=recipe))
    figure.suptitle(title, fontsize=11)
    above.set_ylabel("loss (nats per byte)")
    line = "training" if window == 1 else f"training, mean of {window} steps"
    legend += [
        Line2D([], [], color=_GREY, label=f"lines: {line}"),
        Line2D([], [], color=_GREY, marker="o", linestyle="", label="dots: validation"),
    ]
    above.legend(handles=legend, frameon=False, ncols=2)
    below.axhline(0.0, color=_COLORS[0], linewidth=1)
    below.set_ylabel("loss minus high precision\n(nats per byte)")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(color="#e5e5e5", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values at each point, over fewer at the start.

    Args:
        values: [n] float64.
        window: At least 1.

    Returns:
        [n] float64.
    """
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[begins]) / (ends - begins))


_Losses = dict[str, dict[int, float]]


def _losses(run: Metrics) -> _Losses:
    """Training and validation losses by step."""
    return {
        "training": {record.step: record.loss for record in run.train},
        "validation": {record.step: record.loss for record in run.validation},
    }


def _draw(
    axes: Axes,
    run: Metrics,
    minus: _Losses,
    window: int,
    *,
    color: str,
    width: float,
    size: float,
    dash: Any = "-",
    pale: bool = False,
) -> None:
    """A smoothed line of training losses and dots of validation losses; less `minus`, if any."""
    curves = _losses(run)
    for name, subtracted in minus.items():
        common = {step: loss for step, loss in curves[name].items() if step in subtracted}
        curves[name] = {step: loss - subtracted[step] for step, loss in common.items()}
    steps, losses = list(curves["training"]), np.array([*curves["training"].values()], np.float64)
    if window > 1 and not minus:
        axes.plot(steps, losses, color=color, alpha=0.12, linewidth=0.8)
    alpha = _PALE if pale else 1.0
    axes.plot(
        *(steps, smooth(losses, window)),
        color=color,
        linewidth=width,
        linestyle=dash,
        alpha=alpha,
    )
    dots = curves["validation"]
    axes.plot([*dots], [*dots.values()], "o", color=color, markersize=size, alpha=alpha)
