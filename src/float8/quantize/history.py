"""Delayed scaling: the state of one cast, and history -> scale of many at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from float8.quantize.scale import amax_to_scale

UNKNOWN_SCALE = 0.0
"""Marks a scale that no sync has set yet: the cast then takes its scale from the data. It is a
value and not a flag, so that compiled graphs and checkpoints carry it."""


class DelayedScale(NamedTuple):
    """The state that a cast with delayed scaling reads and writes: two 0-dim float32 tensors."""

    scale: Tensor
    """Decode scale for this step, or `UNKNOWN_SCALE`."""

    amax: Tensor
    """Largest amax seen since the last sync: over microbatches, repeated calls, recomputation."""

    def record(self, amax: Tensor) -> None:
        """Raise the amax to `amax`, 0-dim float32; a NaN stays."""
        self.amax.copy_(torch.maximum(self.amax, amax))

    def apart(self) -> "DelayedScale":
        """Return the same scale with a fresh amax, which the caller records afterwards.

        So a cast reads nothing that it wrote: compiled code may do it again, as it does for
        activation checkpointing.
        """
        # Not `zeros_like`, for which a compiler would keep the amax.
        fresh = torch.zeros((), dtype=torch.float32, device=self.amax.device)
        return self._replace(amax=fresh)


def next_history_and_scale(
    amax: Tensor,
    history: Tensor,
    scale: Tensor,
    float8_max: Tensor,
    *,
    scale_fn_name: str,
    round_to_power_of_2: bool,
) -> tuple[Tensor, Tensor]:
    """Push the amaxes of a step into their histories, and compute the next scales.

    Where the amax is 0 (nothing was recorded since the last update, or only zeros) history and
    scale stay as they were, so an update too many forgets nothing. A non-finite amax is recorded
    as 0, so that one overflowing step does not spoil the scales of the next `history_len` steps;
    where the reduced history is 0 the scale stays as it was. `UNKNOWN_SCALE` stays until an amax is
    less than twice the largest before it: gradients grow by orders of magnitude in the first step
    where weights begin near zero.

    Args:
        amax: [S] float32, recorded since the last update.
        history: [S, history_len] float32, most recent first.
        scale: [S] float32.
        float8_max: [S] float64, the largest value of each cast's format.
        scale_fn_name: `"max"` or `"most_recent"`, as in `DelayedScalingConfig`.
        round_to_power_of_2: round the scales up to powers of two.

    Returns:
        history and scale, new tensors of the same shapes.
    """
    latest, before = amax.nan_to_num(0.0, 0.0, 0.0), history.amax(dim=1)
    settled = (latest - before).abs() < before  # 0 < latest < 2 * before
    known = settled | (scale != UNKNOWN_SCALE)
    pushed = torch.cat([latest.unsqueeze(1), history[:, :-1]], dim=1)
    history = torch.where((amax != 0).unsqueeze(1), pushed, history)
    peak = history.amax(dim=1) if scale_fn_name == "max" else history[:, 0]
    fresh = amax_to_scale(peak, float8_max, round_to_power_of_2)
    return history, torch.where(known & (peak > 0), fresh, scale)
