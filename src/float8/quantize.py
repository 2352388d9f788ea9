"""Choose the scale of a tensor, cast it to float8 and lay it out as row and column data."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.config import CastConfig, Granularity
from float8.formats import FLOAT8_MAX, GEMM_ALIGNMENT
from float8.kernels.dequantise import dequantised_by_kernel
from float8.scales import UNKNOWN_SCALE, DelayedScale, Operand, Quantized, amax_to_scale

Reduction = Callable[[Tensor], Tensor]
"""Takes the amax of this rank's part of a tensor, returns that of the whole; collective."""


class Cast(NamedTuple):
    """The format and scaling of one tensor in one call of `quantize`."""

    how: CastConfig
    """Format, granularity and scaling."""
    state: DelayedScale | None = None
    """State of delayed scaling: its scale is used if known; else one comes from the tensor."""
    record: bool = False
    """Whether `state` learns the amax of the tensor."""
    reduce: Reduction | None = None
    """Turns an amax into that of all ranks; used if the one scale may come from the tensor. With a
    `state` it always runs, since all ranks must take part. Finer scales are of this rank's part."""
    scale: Tensor | None = None
    """The one scale, if it is known already: then nothing else chooses one."""


def quantize(
    x: Tensor,
    cast: Cast,
    *,
    row: bool = False,
    col: bool = False,
    pad_rows: bool = False,
    after: Tensor | None = None,
    traced: bool = False,
    via: torch.dtype | None = None,
) -> Quantized:
    """Cast `x` [R, C] to float8: row and column data as asked for; see `kernels.cast`.

    A scale that is chosen here is a new tensor, which no later sync changes.

    Args:
        x: float32, bfloat16 or float16.
        cast: format, granularity and scaling.
        row: make row data.
        col: make column data.
        pad_rows: pad R of the row data to 16: needed where R is a GEMM's output feature dim.
        after: what a compiler must have computed first.
        traced: in compiled code take amaxes by plain torch code, which a compiler fuses into what
            produces `x`. With finer scales also cast by plain torch. A state records its amax
            outside the cast, because backward may repeat the cast.
        via: round `x` to this dtype first, as autocast and FSDP2 round weights. Under one dynamic
            scale the kernel that casts does so.

    Raises:
        TypeError: the dtype of `x` is none that can be cast.
        ValueError: `x` has other dims, no layout is asked for, a scale is no float32 element on the
            device of `x`, or a state or a scale is given with finer scales.
    """
    how, state, record, reduce, scale = cast
    one_scale = how.scaling_granularity.one_scale
    traced = traced and torch.compiler.is_compiling()
    if via is not None and (via is x.dtype or state is not None or not one_scale):
        x, via = x.to(via), None
    if one_scale and scale is None and (reduce is not None or traced or via is not None):
        scale = scale_of(x, cast, via)
    return Quantized(
        *kernels.cast(
            x, how, row=row, col=col, pad_rows=pad_rows, scale=scale,
            state=None if scale is not None else state, record=record, via=via, after=after,
            traced=traced,
        )
    )  # fmt: skip


def scale_of(x: Tensor, cast: Cast, via: torch.dtype | None = None) -> Tensor:
    """Choose the one scale of `x`, rounded to `via`, and cast nothing."""
    amax = kernels.amax(x)
    if via is not None:  # rounding keeps the order of numbers
        amax = amax.to(via).to(torch.float32)
    if cast.state is not None and cast.record:
        cast.state.record(amax)
    amax = amax if cast.reduce is None else cast.reduce(amax)
    scale = amax_to_scale(amax, cast.how.dtype, cast.how.power_of_2)
    if cast.state is None:
        return scale
    return torch.where(cast.state.scale == UNKNOWN_SCALE, scale, cast.state.scale)


def scales_of(
    tensors: Sequence[Tensor], how: CastConfig, dtype: torch.dtype, reduce: Reduction | None = None
) -> list[Tensor]:
    """Find the one dynamic scale of each of several tensors in a few kernels, 0-dim float32.

    They are not empty, all of one dtype, on one device. `dtype`: what they are rounded to before
    they are cast. `reduce` takes all amaxes, float32 [len(tensors)], and returns those to use.
    """
    amaxes = torch.stack(torch._foreach_norm(list(tensors), float("inf")))
    # As in `scale_of`: the amax of rounded values is the rounded amax.
    amaxes = amaxes.to(dtype).to(torch.float32)
    if reduce is not None:
        amaxes = reduce(amaxes)
    scales = amax_to_scale(amaxes, how.dtype, how.power_of_2)
    # Copies, in one kernel: cuBLASLt takes scales at multiples of 16 bytes only.
    return list(torch._foreach_abs(scales.unbind()))


def recast(x: Tensor, how: CastConfig, scale: Tensor) -> Operand:
    """Return column data of `x` [R, C], which was cast before, under the same scale if it has one.

    `x` may be the bytes that the cast before made, of which a compiler then keeps the transposed
    copy instead, one for all layers that read them. Else, when compiled:

    - One scale: plain torch code casts `x`, made again from what is kept anyway, say an activation
      function from its input, and not yet rounded to the dtype of `x`.
    - Finer scales: our kernel casts in forward, since the compiler's own for the amaxes of columns
      take longer than to write `x` and read it.
    """
    if x.dtype in FLOAT8_MAX:
        return to_col(Operand(x, scale), how)
    x, one_scale = x.detach(), how.scaling_granularity.one_scale
    if one_scale and torch.compiler.is_compiling():
        return to_col(Operand(kernels.to_float8(x, scale, how.dtype), scale), how)
    return quantize(x, Cast(how, scale=scale if one_scale else None), col=True).col


def padded(row: Operand, granularity: Granularity, pad_rows: bool = True) -> Operand:
    """Zero-pad row data [R, C] or [E, R, C] as a cast does; return `row` if no padding is due."""
    data, scale = row
    to = granularity.width or GEMM_ALIGNMENT
    bottom = -data.shape[0] % to if pad_rows and data.dim() == 2 else 0
    right = -data.shape[-1] % to
    if not bottom and not right:
        return row
    if bottom and granularity.height == 1:
        scale = F.pad(scale, (0, 0, 0, bottom), value=1.0)
    padded = F.pad(data.view(torch.uint8), (0, right, 0, bottom))
    return Operand(padded.view(data.dtype), scale)


def to_col(row: Operand, how: CastConfig, after: Tensor | None = None) -> Operand:
    """Return column data of row data [R, C] that were cast by `how`; `after` as `kernels.cast`.

    Bytes are transposed where columns have the scales of rows. Where rows or runs have scales of
    their own, the values are cast again: with powers of two as scales that changes no value but
    those that are tiny in their column; what was tiny in its row was rounded before.
    """
    granularity = how.scaling_granularity
    if granularity.one_scale:
        return Operand(kernels.transpose_bytes(row.data, after=after), row.scale)
    if granularity.square and granularity.width is not None:
        row = padded(row, granularity)
        scale = row.scale[:, : row.data.shape[1] // granularity.width].t()
        scale = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
        return Operand(kernels.transpose_bytes(row.data, after=after), scale)
    return quantize(dequantized(row, how), Cast(how), col=True, after=after).col


def dequantized(row: Operand, how: CastConfig) -> Tensor:
    """Return `data * scale` of row data that were cast by `how`, exact: bfloat16 or float32."""
    # A float8 value times a power of two is exact in bfloat16.
    dtype = torch.bfloat16 if how.power_of_2 else torch.float32
    return dequantised_by_kernel(row, how.scaling_granularity, dtype)
