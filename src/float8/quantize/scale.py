"""amax -> decode scale. The only place where a scale is computed."""

import torch
from torch import Tensor

from float8.formats import E4M3

SMALLEST_AMAX = 2.0**-100
"""Floor of amax, so that neither the scale nor its reciprocal leaves float32's normal range."""


def amax_to_scale(amax: Tensor, dtype: torch.dtype | Tensor, round_to_power_of_2: bool) -> Tensor:
    """Return the decode scale that maps `amax` to the largest value of a float8 format.

    `scale = max(amax, 2**-100) / max(dtype)`, correctly rounded to float32: `x / scale` fills the
    format's range, `data * scale` gives `x` back. With `round_to_power_of_2` the scale is rounded
    up, so that nothing saturates.

    Args:
        amax: float32, any shape, >= 0. NaN gives NaN and Inf gives Inf.
        dtype: a float8 format; or float64, shape of `amax`: the largest value of each one's format.
        round_to_power_of_2: round the scale up to a power of two.

    Returns:
        float32, shape of `amax`.
    """
    # Literals, here and for SMALLEST_AMAX: with dynamic=True, Dynamo makes floats of a module
    # symbolic and then fails on them.
    largest = dtype if isinstance(dtype, Tensor) else 448.0 if dtype == E4M3 else 57344.0
    # float64 makes the quotient, once rounded to float32, the correctly rounded one whether a
    # backend divides or multiplies by the reciprocal: eager, Inductor, CPU and GPU agree bitwise.
    scale = (amax.clamp(min=7.888609052210118e-31).to(torch.float64) / largest).to(torch.float32)
    if not round_to_power_of_2:
        return scale
    # Carry any mantissa bit into the exponent, then drop the mantissa. Inf stays Inf; NaN, whose
    # bits would overflow, is passed by. The scale is a normal number (SMALLEST_AMAX).
    bits = scale.view(torch.int32)
    rounded = ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scale.isnan(), scale, rounded)
