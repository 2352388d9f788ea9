"""Loss curves of several runs, and how far each is from high precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from float8_lab.trainer.metrics import Metrics

_COLORS = ("#333333", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def plot_comparison(runs: dict[str, Metrics], title: str, path: Path) -> None:
    """Draw the loss of every run above its difference to the first one.

    Args:
        runs: Recipe -> record; the first one is the reference, high precision.
        title: What was trained.
        path: Image to write; the format is that of its suffix.
    """
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = next(iter(runs.values()))
    window = max(len(reference.train) // 40, 1)
    for (recipe, run), color in zip(runs.items(), _cycle(len(runs)), strict=True):
        _draw_loss(above, run, recipe, color, window)
        if run is not reference:
            _draw_difference(below, run, reference, recipe, color, window)
    figure.suptitle(title, fontsize=11)
    above.set_ylabel("loss (nats per byte)")
    above.legend(frameon=False, ncols=2)
    below.axhline(0.0, color=_COLORS[0], linewidth=1)
    below.set_ylabel("loss minus high precision\n(nats per byte)")
    below.set_xlabel("optimizer step")
    if window > 1:
        note = f"lines: training loss, mean of {window} steps"
        above.set_title(f"{note} · dots: validation", fontsize=9, color="#666666", loc="left")
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


def _draw_loss(axes: Axes, run: Metrics, recipe: str, color: str, window: int) -> None:
    steps, losses = _curve(run)
    if window > 1:
        axes.plot(steps, losses, color=color, alpha=0.15, linewidth=0.8)
    axes.plot(steps, smooth(losses, window), color=color, linewidth=1.6, label=recipe)
    if run.validation:
        axes.plot(
            [record.step for record in run.validation],
            [record.loss for record in run.validation],
            "o",
            color=color,
            markersize=4.5,
            markeredgecolor="white",
        )


def _draw_difference(
    axes: Axes, run: Metrics, reference: Metrics, recipe: str, color: str, window: int
) -> None:
    shared = min(len(run.train), len(reference.train))
    steps, losses = _curve(run)
    difference = losses[:shared] - _curve(reference)[1][:shared]
    axes.plot(steps[:shared], smooth(difference, window), color=color, linewidth=1.4, label=recipe)
    expected = {record.step: record.loss for record in reference.validation}
    points = [(r.step, r.loss - expected[r.step]) for r in run.validation if r.step in expected]
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=color, markersize=4.5)


def _curve(run: Metrics) -> tuple[np.ndarray, np.ndarray]:
    steps = np.array([record.step for record in run.train])
    return steps, np.array([record.loss for record in run.train], dtype=np.float64)


def _cycle(count: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(count)]
