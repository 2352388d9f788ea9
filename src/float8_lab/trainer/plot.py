"""Loss curves of several runs, and how far each is from high precision."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from float8_lab.trainer.metrics import Metrics

Losses = dict[int, float]  # by step

_COLORS = ("#333333", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREY = "#666666"


def plot_comparison(runs: dict[str, Metrics], title: str, path: Path) -> None:
    """Draw the loss of every run above its difference to the first one.

    Curves that coincide are all seen: the reference is a wide line below the others, whose dashes
    take turns; its dots are larger than theirs. Differences are whole lines, each thinner than the
    one before. The first of `runs`, by their names, is the reference. The format is that of the
    suffix of `path`.
    """
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference, *others = map(_losses, runs.values())
    window = max(len(reference[0]) // 40, 1)
    wide = {"color": _COLORS[0], "linewidth": 4.0, "alpha": 0.45}
    _draw(above, reference, window, wide, 9.0, raw=True)
    styles: list[dict[str, Any]] = [wide]
    for index, losses in enumerate(others):
        dash = "-" if len(others) == 1 else (6.0 * index, (6.0, 6.0 * (len(others) - 1)))
        style = {"color": _COLORS[1 + index % (len(_COLORS) - 1)], "linewidth": 1.6}
        dots, thin = (x * (1 - index / (len(others) + 1)) for x in (6.5, 3.6))
        _draw(above, losses, window, {**style, "linestyle": dash}, dots, raw=True)
        gaps = [
            {step: loss - base[step] for step, loss in own.items() if step in base}
            for own, base in zip(losses, reference, strict=True)
        ]
        _draw(below, gaps, window, {**style, "linewidth": thin}, dots)
        styles.append(style)
    legend = [Line2D([], [], label=name, **how) for name, how in zip(runs, styles, strict=True)]
    line = "training" if window == 1 else f"training, mean of {window} steps"
    legend += [
        Line2D([], [], color=_GREY, label=f"lines: {line}"),
        Line2D([], [], color=_GREY, marker="o", linestyle="", label="dots: validation"),
    ]
    figure.suptitle(title, fontsize=11)
    above.legend(handles=legend, frameon=False, ncols=2)
    above.set_ylabel("loss (nats per byte)")
    below.axhline(0.0, color=_COLORS[0], linewidth=1)
    below.set_ylabel(f"loss minus {next(iter(runs)).replace('_', ' ')}\n(nats per byte)")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(color="#e5e5e5", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values at each point, over fewer at the start: [n] float64."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[begins]) / (ends - begins))


def _losses(run: Metrics) -> list[Losses]:
    """Of training and of validation."""
    return [{each.step: each.loss for each in run.train}, {v.step: v.loss for v in run.validation}]


def _draw(
    axes: Axes,
    losses: list[Losses],
    window: int,
    style: dict[str, Any],
    size: float,
    raw: bool = False,
) -> None:
    """A smoothed line of training losses, on a faint one of `raw` ones, and dots of validation."""
    training, validation = losses
    values = np.array([*training.values()], np.float64)
    if window > 1 and raw:
        axes.plot([*training], values, color=style["color"], alpha=0.12, linewidth=0.8)
    axes.plot([*training], smooth(values, window), **style)
    dots = {name: style[name] for name in ("color", "alpha") if name in style}
    axes.plot([*validation], [*validation.values()], "o", markersize=size, **dots)
