"""Scales: from an amax, and from a history of amaxes. Nothing here communicates."""

from float8.scaling.delayed import UNKNOWN_SCALE, DelayedScale, next_history_and_scale
from float8.scaling.scale import SMALLEST_AMAX, amax_to_scale

__all__ = [
    "SMALLEST_AMAX",
    "UNKNOWN_SCALE",
    "DelayedScale",
    "amax_to_scale",
    "next_history_and_scale",
]
