"""Computation of scales from amaxes, and tuples of float8 data with their scales."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.config import Granularity
from float8.formats import E4M3

SMALLEST_AMAX = 2.0**-100
"""Smaller amaxes count as this one (not in MXFP8), so scales and reciprocals are normal."""


def amax_to_scale(amax: Tensor, dtype: torch.dtype | Tensor, round_to_power_of_2: bool) -> Tensor:
    """Return the decode scale that maps `amax` to the largest value of the float8 format `dtype`.

    `scale = max(amax, 2**-100) / max(dtype)`, correctly rounded to float32: `x / scale` fills the
    format's range, and `x ≈ data * scale`. `round_to_power_of_2` rounds the scale up to a power of
    two, so that nothing saturates. `amax` is float32 of any shape, >= 0; NaN gives NaN, Inf gives
    Inf. For amaxes of several formats, `dtype` is a float64 tensor of the largest value of each.
    """
    # Literals instead of `FLOAT8_MAX` and `SMALLEST_AMAX`, 7.9e-31: with dynamic=True Dynamo would
    # make floats of a module symbolic, and then fail.
    largest = dtype if isinstance(dtype, Tensor) else (448.0 if dtype == E4M3 else 57344.0)
    # float64 makes the quotient, once rounded to float32, the correctly rounded one whether a
    # backend divides or multiplies by the reciprocal: eager, Inductor, CPU and GPU agree bitwise.
    scale = (amax.clamp(min=7.888609052210118e-31).to(torch.float64) / largest).to(torch.float32)
    if not round_to_power_of_2:
        return scale
    # A mantissa other than 0 carries into the exponent, then the mantissa is dropped. Inf stays
    # Inf. The bits of NaN would overflow. No scale is subnormal, thanks to SMALLEST_AMAX.
    bits = scale.view(torch.int32)
    rounded = ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scale.isnan(), scale, rounded)


def amax_to_exponent(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the MXFP8 scale of blocks: `amax / max(dtype)` rounded up to a power of two.

    `amax` is float32 of any shape, >= 0. The scale is float32, at least 2**-127, so that an 8-bit
    exponent (E8M0) holds it. Inf gives 2**127, NaN gives NaN.
    """
    # The largest values are 1.75 times a power of two, so a mantissa above 1.75 rounds up.
    bits, bias = amax.view(torch.int32), 8 if dtype == E4M3 else 15
    exponent = ((bits.clamp(max=0x7F800000) + 0x1FFFFF) >> 23) - bias
    exponent = torch.where(bits >= 0x7F800000, 254, exponent).clamp(min=0)  # Inf: 2**127
    scale = torch.where(exponent == 0, 0x00400000, exponent << 23)  # 2**-127 is subnormal
    return torch.where(amax.isnan(), 0x7FC00000, scale).view(torch.float32)  # a NaN


def inverse_of_exponent(scale: Tensor) -> Tensor:
    """Return `1 / scale` of MXFP8 scales, which are powers of two, but 1 for the smallest, 2**-127.

    Blocks with that scale hold tiny values: times 1, all round to zero, as in TransformerEngine.
    """
    # By integers: not every backend divides exactly, or gives 2**-127, which is subnormal.
    bits = scale.view(torch.int32)
    inverse = torch.where(bits == 0x7F000000, 0x00400000, 0x7F000000 - bits)  # 2**127: 2**-127
    inverse = torch.where(bits == 0x00400000, 0x3F800000, inverse).view(torch.float32)  # 2**-127: 1
    return torch.where(scale.isnan(), scale, inverse)


class Operand(NamedTuple):
    """One operand of a GEMM: float8 data and their scale."""

    data: Tensor
    """float8 [R, C], or weights of experts [E, N, K]. For GEMMs, contiguous along the last dim,
    the contraction dim, and zero-padded along it to a multiple of 16 or of the block width."""
    scale: Tensor
    """float32 decode scales: one element, or the shape that `Granularity.scales` gives for `data`.
    Without blocks, rows of experts [R, K] have [R], weights [E, N, K] have [E, N]. Column data of
    such rows, [K, T], have [E, K], or [K, T / k] by 1 x k blocks. Squares may be less padded."""


class Quantized(NamedTuple):
    """A tensor in float8: row data [R, C], column data [C, R] (the transposed copy), or both."""

    row: Operand | Any = None
    """The row data [R, C], which GEMMs contract over C, or None."""
    col: Operand | Any = None
    """The column data [C, R], which GEMMs contract over R, or None. They are quantized from values
    in high precision or, by `to_col`, made from row data. For rows of experts: a `Columns`."""


def dequantised(
    operand: Operand, granularity: Granularity, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `data * scale` of an operand of any shape, computed in float32, rounded to `dtype`."""
    (data, scale), height, width = operand, granularity.height, granularity.width
    values = data.to(torch.float32)
    if granularity.one_scale:
        scale = scale.reshape(())
    if width is not None:  # repeat scales along rows; compiled code does not copy an expanded view
        scale = scale.unsqueeze(-1).expand(*scale.shape, width).flatten(-2)
        scale = scale[..., : data.shape[-1]]  # the last block may be cut
    if height not in (None, 1):  # squares: repeat scales along columns, too
        scale = scale.repeat_interleave(height, dim=-2)[..., : data.shape[-2], :]
    values = values.mul_(scale)
    # Where `.to()` does nothing, torch 2.11's Dynamo traces gradients of zero for its result.
    return values if dtype == torch.float32 else values.to(dtype)
