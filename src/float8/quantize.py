"""The one door for casts: choose the scale of a tensor, cast it, lay it out."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.config import CastConfig, Granularity
from float8.formats import FLOAT8_MAX, GEMM_ALIGNMENT
from float8.kernels.cast_groups import cast_groups
from float8.kernels.dequantise import dequantised_by_kernel
from float8.scales import UNKNOWN_SCALE, DelayedScale, Operand, Quantized, amax_to_scale

Reduction = Callable[[Tensor], Tensor]
"""Takes the amax of this rank's part of a tensor, returns that of the whole; collective."""


class Cast(NamedTuple):
    """One cast of one tensor in one call: bound once, handed on whole."""

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
    offs: Tensor | None = None,
) -> Quantized:
    """Cast `x` [R, C] to float8: row and column data as asked for; see `kernels.cast`.

    A scale that is chosen here is a new tensor, which no later sync changes.

    Args:
        x: as there; or [E, R, C], the weights of experts, each under dynamic scales of its own: see
            `_cast_each`.
        cast: how.
        row: make row data.
        col: make column data.
        pad_rows: pad R of the row data to 16: needed where R is a GEMM's output feature dim.
        after: what a compiler must have computed first.
        traced: in compiled code take amaxes by plain torch code, which a compiler fuses into what
            produces `x`. With finer scales also cast by plain torch. A state records its amax
            outside the cast, because backward may repeat the cast.
        via: round `x` to this dtype first, as autocast and FSDP2 round weights. Under one dynamic
            scale the kernel that casts does so.
        offs: where groups of rows end, each under dynamic scales of its own: see `cast_groups`,
            whose layouts the result has.

    Raises:
        TypeError: the dtype of `x` is none that can be cast.
        ValueError: `x` has other dims, no layout is asked for, a scale is no float32 element on the
            device of `x`, or a state or a scale is given with finer scales.
    """
    how, state, record, reduce, scale = cast
    if offs is not None or x.dim() == 3:
        covers = how.scaling_granularity
        known = scale is not None and (offs is not None or not covers.one_scale)
        wrong = offs is not None and covers.by_blocks and covers.square
        if known or wrong or state is not None or reduce is not None:
            raise ValueError(
                f"quantize: got {covers}, or a state, scale or reduction, for groups of rows or "
                f"weights of experts, expected dynamic scales of each; no squares for groups"
            )
        if offs is not None:
            return cast_groups(x, offs, how, row=row, col=col)
        return _cast_each(x.detach(), how, scale, after, row=row, col=col)
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


def _cast_each(
    weights: Tensor,
    how: CastConfig,
    scale: Tensor | None,
    after: Tensor | None,
    *,
    row: bool,
    col: bool,
) -> Quantized:
    """Cast the weights [E, N, K] of experts, each under scales of its own, or given ones [E].

    To row data [E, N, ceil16(K)] with scales [E, N], column data [E, K, ceil16(N)] with [E, K].
    The weights are viewed as one matrix with E equal groups of rows. For storage [E, K, N], row and
    col requests are swapped instead of copying. Weights stored otherwise are copied.

    By squares of k row data are [E, N, ceil_k(K)] with scales [E, ceil(N / k), ceil(K / k) or
    more], column data [E, K, ceil_k(N)] with [E, ceil(K / k), ceil(N / k) or more]. By runs they
    have scales [E, N, ceil(K / k)] and [E, K, ceil(N / k)].
    """
    if transposed := weights.transpose(1, 2).is_contiguous():
        weights, row, col = weights.transpose(1, 2), col, row
    E, R, C = weights.shape
    of_row: Operand | None = None
    of_col: Operand | None = None
    if (covers := how.scaling_granularity).width is not None:
        if R % covers.width:  # each by itself: a compiler would keep a copy that is filled up
            each: Any = [kernels.cast(x, how, row=row, col=col, after=after) for x in weights]
            of_row, of_col = (_stacked(x) if x[0] else None for x in zip(*each, strict=True))
            of_row = of_row and Operand(*(x[:, :R] for x in of_row))  # of squares there are fewer
        else:
            matrix = weights.contiguous().view(-1, C)
            of_row, of_col = kernels.cast(matrix, how, row=row, col=col, after=after)
            if of_row is not None:
                of_row = Operand(*(x.view(E, x.shape[0] // E, -1) for x in of_row))
            if of_col is not None:  # those of each expert lie beside each other
                beside = of_col.data, of_col.scale[:, : R * E // covers.width]
                of_col = Operand(*(x.view(len(x), E, -1).transpose(0, 1) for x in beside))
        of_col = of_col and Operand(*(x[:, :C] for x in of_col))
        return Quantized(of_col, of_row) if transposed else Quantized(of_row, of_col)
    ends = torch.arange(R, E * R + 1, R, dtype=torch.int32, device=weights.device)
    matrix, width = weights.contiguous().view(E * R, C), (R + 127) // 128 * 128
    known = {"scale": scale, "after": after}
    made = cast_groups(matrix, ends, how, row=row, col=col, width=E * width, **known)
    if row:
        of_row = Operand(made.row.data.view(E, R, -1), made.row.scale.view(E, R))
    if col:  # those of each expert lie beside each other
        data = made.col.data.view(-1, E, width).transpose(0, 1)
        of_col = Operand(data[:, :C, : R + -R % 16], made.col.scale[:, :C])
    return Quantized(of_col, of_row) if transposed else Quantized(of_row, of_col)


def _stacked(parts: Sequence[Operand]) -> Operand:
    """Stack data, as bytes, since few backends know float8, and scales."""
    data = torch.stack([x.data.view(torch.uint8) for x in parts]).view(parts[0].data.dtype)
    return Operand(data, torch.stack([x.scale for x in parts]))


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
    """Return row data [R, C] or [E, R, C] as a cast pads them: themselves, if that is nothing."""
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
    """Return column data of row data that were cast by `how`; `after` as `kernels.cast`.

    Row data are [R, C], or [E, N, K] of experts with scales of squares, or [E, N, 1], alike under
    one scale each. Bytes are transposed where columns have the scales of rows. Where rows or runs
    have scales of their own, the values are cast again: with powers of two as scales that changes
    no value but those that are tiny in their column; what was tiny in its row was rounded before.
    """
    granularity = how.scaling_granularity
    if granularity.square and row.data.dim() == 3:
        E, N, K = row.data.shape
        below = -N % (granularity.height or GEMM_ALIGNMENT)
        matrix = F.pad(row.data.view(torch.uint8), (0, 0, 0, below)).flatten(0, 1)
        data = kernels.transpose_bytes(matrix.view(row.data.dtype), after=after)
        data = data[:K].view(K, E, -1).transpose(0, 1)
        if granularity.by_blocks:
            return Operand(data, row.scale.mT)
        return Operand(data, row.scale[:, 0].expand(E, K).contiguous())
    if granularity.one_scale:
        return Operand(kernels.transpose_bytes(row.data, after=after), row.scale)
    if granularity.square and granularity.width is not None:
        row = padded(row, granularity)
        scale = row.scale[:, : row.data.shape[1] // granularity.width].t()
        scale = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
        return Operand(kernels.transpose_bytes(row.data, after=after), scale)
    # Times a power of two a float8 value is exact in bfloat16, too.
    dtype = torch.bfloat16 if how.power_of_2 else torch.float32
    values = dequantised_by_kernel(row, granularity, dtype)
    return quantize(values, Cast(how), col=True, after=after).col
