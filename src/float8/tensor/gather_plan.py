"""How a weight is to be gathered in float8, and the scale that was computed for it ahead."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class GatherPlan:
    """How one weight is cast; one object for all tensors made of it, on any device."""

    dtype: torch.dtype
    """The float8 format."""

    delayed: bool
    """Whether the scale comes from the layer's history; else from the weight itself."""

    round_to_power_of_2: bool

    param_dtype: torch.dtype | None = field(default=None, compare=False)
    """The dtype it is rounded to before the cast, known from its first gather on."""


class PrecomputedScale(NamedTuple):
    """The scale of the whole weight, of which this tensor may be a part."""

    scale: Tensor
    """0-dim float32 decode scale."""

    param_dtype: torch.dtype
    """The dtype that the weight was taken to be rounded to."""


class SharedScale:
    """What all views of the same memory have in common, so that a write into one tells all."""

    def __init__(self, precomputed: PrecomputedScale | None = None, blank: bool = False) -> None:
        self.precomputed = precomputed
        self.blank = blank  # all zeros: any scale covers it
