"""How a weight is to be gathered in float8."""

from dataclasses import dataclass, field

import torch


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
