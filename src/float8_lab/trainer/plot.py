"""Loss curves of several recipes, how far each is from high precision, and the noise."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from float8_lab.trainer.metrics import Metrics

_COLORS = ("#999999", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def plot_comparison(
    recipes: dict[str, list[Metrics]], pairs: Sequence[Sequence[Metrics]], title: str, path: Path
) -> None:
    """Draw the mean loss of every recipe's runs above its difference to the first, the reference.

    Lines are training, dots validation. Each curve is thinner than the one below it. A band shows
    how far apart the two runs of `pairs` are, which differ by noise alone.
    """
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = next(iter(recipes.values()))
    window = max(len(reference[0].train) // 40, 1)
    for index, (name, runs) in enumerate(recipes.items()):
        width = 1.2 + 6 * (1 - (index + 1) / len(recipes))
        style: dict[str, Any] = {"color": _COLORS[index % len(_COLORS)], "linewidth": width}
        for axes, base in ((above, []), (below, reference)):
            if axes is above or index:
                axes.plot(*_smooth(*_mean(runs, base, "train"), window), label=name, **style)
                axes.plot(*_mean(runs, base, "validation"), "o", markersize=3 + width, **style)
    apart = [_smooth(*_mean([run], [again], "train"), window) for run, again in pairs]
    if apart:
        steps = min((steps for steps, _ in apart), key=len)
        noise = np.sqrt(np.mean([gaps[: len(steps)] ** 2 for _, gaps in apart], axis=0))
        below.fill_between(steps, -noise, noise, color=_COLORS[0], alpha=0.3, linewidth=0)
    about = f"lines: training, mean of {window} steps; dots: validation"
    about += "; band: two runs in high precision" * bool(apart)
    figure.suptitle(f"{title}\n{about}", fontsize=11)
    above.legend(frameon=False, ncols=2)
    above.set_ylabel("loss (nats per byte)")
    below.axhline(0.0, color=_COLORS[0], linewidth=1, zorder=0)
    below.set_ylabel(f"loss minus {next(iter(recipes)).replace('_', ' ')}\n(nats per byte)")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(color="#e5e5e5", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _mean(
    runs: Sequence[Metrics], base: Sequence[Metrics], kind: str
) -> tuple[list[int], np.ndarray]:
    """Return steps that all runs have, and the mean loss, minus that of `base` if there is one."""
    curves = [{x.step: x.loss for x in getattr(run, kind)} for run in (*runs, *base)]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    losses = np.array([[curve[step] for step in steps] for curve in curves])  # [runs, steps]
    mean = losses[: len(runs)].mean(0)
    return steps, mean - losses[len(runs) :].mean(0) if base else mean


def _smooth(steps: list[int], losses: np.ndarray, window: int) -> tuple[list[int], np.ndarray]:
    """Return means of `window` steps, or of all if there are fewer."""
    count = max(min(window, len(steps)), 1)
    means = np.convolve(losses, np.full(count, 1 / count), "valid") if steps else losses
    return steps[count - 1 :], means
