"""The scales that casts choose."""

import torch
from float8.cast import CastPlan, quantize
from float8.scaling import DelayedScale, amax_to_scale
from torch import Tensor

from float8 import kernels


def dynamic_scale(x: Tensor, dtype: torch.dtype, round_to_power_of_2: bool) -> Tensor:
    """The scale from the tensor's own amax: as the cast takes it, and as a compiler is given it."""
    apart = amax_to_scale(kernels.amax(x), dtype, round_to_power_of_2)
    if x.dim() == 2 and not torch.compiler.is_compiling():
        plan = CastPlan(dtype, False, round_to_power_of_2)
        together = quantize(x, plan, None, row=True).scale
        assert torch.equal(together.nan_to_num(-1.0), apart.nan_to_num(-1.0))
    return apart


def delayed_scale(
    x: Tensor, dtype: torch.dtype, round_to_power_of_2: bool, state: DelayedScale, record: bool
) -> Tensor:
    """The scale that a cast with delayed scaling takes."""
    plan = CastPlan(dtype, True, round_to_power_of_2)
    return quantize(x, plan, state, row=True, record=record).scale
