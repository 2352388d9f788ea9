"""Loss curves of several runs, and how far each is from high precision."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from float8_lab.trainer.metrics import Metrics, StepRecord, ValidationRecord

Record = StepRecord | ValidationRecord

_COLORS = ("#999999", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def plot_comparison(runs: dict[str, Metrics], title: str, path: Path) -> None:
    """Draw the loss of every run above its difference to the first one, the reference.

    Lines are training, dots validation. Each curve is thinner than the one below it.
    """
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = next(iter(runs.values()))
    window = max(len(reference.train) // 40, 1)
    for index, (name, run) in enumerate(runs.items()):
        width = 1.2 + 1.6 * (len(runs) - 1 - index)
        how: dict[str, Any] = {"color": _COLORS[index % len(_COLORS)], "linewidth": width}
        for axes, base in ((above, Metrics()), (below, reference)):
            if axes is above or index:
                steps, losses = _curve(run.train, base.train)
                count = min(window, len(steps))
                if steps:
                    means = np.convolve(losses, np.full(count, 1 / count), "valid")
                    axes.plot(steps[count - 1 :], means, label=name, **how)
                dots = _curve(run.validation, base.validation)
                axes.plot(*dots, "o", markersize=3 + width, **how)
    line = "training" if window == 1 else f"training, mean of {window} steps"
    figure.suptitle(f"{title}\nlines: {line}; dots: validation", fontsize=11)
    above.legend(frameon=False, ncols=2)
    above.set_ylabel("loss (nats per byte)")
    below.axhline(0.0, color=_COLORS[0], linewidth=1, zorder=0)
    below.set_ylabel(f"loss minus {next(iter(runs)).replace('_', ' ')}\n(nats per byte)")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(color="#e5e5e5", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _curve(records: Sequence[Record], base: Sequence[Record]) -> tuple[list[int], list[float]]:
    """Steps and losses; where there is a `base`, losses minus its own at the same steps."""
    known = {record.step: record.loss for record in base}
    shared = [record for record in records if not base or record.step in known]
    return [r.step for r in shared], [r.loss - known.get(r.step, 0.0) for r in shared]
