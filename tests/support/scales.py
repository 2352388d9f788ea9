"""The scales that casts choose."""

import torch
from torch import Tensor

from float8 import kernels
from float8.config import ScalingType
from float8.quantize.history import DelayedScale
from float8.quantize.quantize import Cast, quantize
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import CastSpec


def dynamic_scale(x: Tensor, dtype: torch.dtype, round_to_power_of_2: bool) -> Tensor:
    """The scale from the tensor's own amax: as the cast takes it, and as a compiler is given it."""
    apart = amax_to_scale(kernels.amax(x), dtype, round_to_power_of_2)
    if x.dim() == 2 and not torch.compiler.is_compiling():
        spec = CastSpec(dtype, power_of_2=round_to_power_of_2)
        together = quantize(x, Cast(spec), row=True).row.scale
        assert torch.equal(together.nan_to_num(-1.0), apart.nan_to_num(-1.0))
    return apart


def delayed_scale(
    x: Tensor, dtype: torch.dtype, round_to_power_of_2: bool, state: DelayedScale, record: bool
) -> Tensor:
    """The scale that a cast with delayed scaling takes."""
    spec = CastSpec(dtype, scaling=ScalingType.DELAYED, power_of_2=round_to_power_of_2)
    return quantize(x, Cast(spec, state, record), row=True).row.scale
