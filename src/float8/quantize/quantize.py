"""The one door for casts: choose the scale of a tensor, cast it, lay it out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from float8 import kernels
from float8.config import ScalingGranularity
from float8.formats import FLOAT8_MAX, GEMM_ALIGNMENT
from float8.quantize.history import UNKNOWN_SCALE, DelayedScale
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import BLOCK, CastSpec, Part, Quantized, dequantised


def quantize(
    x: Tensor,
    spec: CastSpec,
    *,
    row: bool = False,
    col: bool = False,
    pad_rows: bool = False,
    state: DelayedScale | None = None,
    record: bool = False,
    scale: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    after: Tensor | None = None,
    fuse_amax: bool = False,
) -> Quantized:
    """Cast `x` to float8.

    Args:
        x: [R, C] float32, bfloat16 or float16, any strides.
        spec: format, granularity and scaling.
        row: make row data.
        col: make column data.
        pad_rows: pad R of the row data to 16: needed where R is a GEMM's output feature dim.
        state: of delayed scaling: the scale is taken from it as long as it knows one. None: the
            scale is taken from `x`.
        record: whether `state` learns the amax of `x`.
        scale: the scale of `TENSORWISE`, where it is known already; nothing else chooses one then.
        reduce: takes the amax of `x` and returns that of the whole tensor, of which `x` is the part
            of this rank; called where the scale comes from `x`, or may do so: where there is a
            `state`, in every call. Finer scales are of the part: it has no effect on them.
        after: what a compiler must have computed first, see `kernels.cast`.
        fuse_amax: let a compiler take amaxes in the kernel that produces `x`, or with a `state`
            record them apart from the cast, which backward may do again. Without effect in eager
            mode, where that kernel has run.

    Returns:
        Row and column data as asked for, padded with zeros to multiples of 16 where a GEMM wants
        that. Scales are new tensors, which a sync does not change.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: `x` is not 2-D, no layout is asked for, or `state` or `scale` is given with
            finer scales.
    """
    if spec.granularity is not ScalingGranularity.TENSORWISE:
        if state is not None or scale is not None:
            raise ValueError(
                f"quantize: got {spec.granularity} with a state or a scale, expected none: finer "
                f"scales come from the tensor at hand"
            )
        fuse = fuse_amax and torch.compiler.is_compiling()
        return Quantized(
            *_finer(x, spec, row=row, col=col, pad_rows=pad_rows, after=after, fuse=fuse)
        )
    if scale is None and state is not None and reduce is None:
        apart = state.apart() if record and fuse_amax and torch.compiler.is_compiling() else None
        scale, row_data, col_data = kernels.cast_delayed(
            x, spec, apart or state, row=row, col=col, pad_rows=pad_rows, record=record
        )
        if apart:
            state.record(apart.amax)
    elif scale is None and reduce is None and not (fuse_amax and torch.compiler.is_compiling()):
        scale, row_data, col_data = kernels.cast_dynamic(
            x, spec, row=row, col=col, pad_rows=pad_rows
        )
    else:
        if scale is None:
            scale = scale_of(x, spec, state, record=record, reduce=reduce)
        row_data, col_data = kernels.cast(
            x, scale, spec.dtype, row=row, col=col, pad_rows=pad_rows, after=after
        )
    return Quantized(
        None if row_data is None else Part(row_data, scale),
        None if col_data is None else Part(col_data, scale),
    )


def scale_of(
    x: Tensor,
    spec: CastSpec,
    state: DelayedScale | None,
    *,
    record: bool,
    reduce: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Choose the one scale of `x` and cast nothing; arguments are those of `quantize`."""
    amax = kernels.amax(x)
    if state is not None and record:
        state.record(amax)
    amax = amax if reduce is None else reduce(amax)
    scale = amax_to_scale(amax, spec.dtype, spec.power_of_2)
    if state is None:
        return scale
    return torch.where(state.scale == UNKNOWN_SCALE, scale, state.scale)


def _finer(
    x: Tensor,
    spec: CastSpec,
    *,
    row: bool,
    col: bool,
    pad_rows: bool,
    after: Tensor | None,
    fuse: bool,
) -> tuple[Part | None, Part | None]:
    """Cast under finer scales than one per tensor; `fuse`: in code that a compiler sees."""
    if spec.granularity is ScalingGranularity.AXISWISE:
        if fuse:
            return kernels.cast_axiswise_traced(x, spec, row=row, col=col, pad_rows=pad_rows)
        return kernels.cast_axiswise(x, spec, row=row, col=col, pad_rows=pad_rows, after=after)
    if fuse:
        return kernels.cast_blockwise_traced(x, spec, row=row, col=col)
    return kernels.cast_blockwise(x, spec, row=row, col=col, after=after)


def scales_of(
    tensors: Sequence[Tensor],
    spec: CastSpec,
    dtype: torch.dtype,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """The scale of each of several tensors, all found in a few kernels.

    Args:
        tensors: float32, bfloat16 or float16, not empty; all of one dtype, on one device.
        spec: of the casts, under one dynamic scale each.
        dtype: what they are rounded to before they are cast.
        reduce: takes all amaxes, float32 [len(tensors)], and returns those to use.

    Returns:
        As many float32 tensors of no dims, each with memory of its own.
    """
    amaxes = torch.stack(torch._foreach_norm(list(tensors), float("inf")))
    # Rounding keeps the order of numbers: the amax of rounded values is the rounded amax.
    amaxes = amaxes.to(dtype).to(torch.float32)
    if reduce is not None:
        amaxes = reduce(amaxes)
    scales = amax_to_scale(amaxes, spec.dtype, spec.power_of_2)
    # Copies, in one kernel: cuBLASLt takes scales at multiples of 16 bytes only.
    return list(torch._foreach_abs(scales.unbind()))


def recast(x: Tensor, spec: CastSpec, scale: Tensor) -> Part:
    """Column data of `x` [R, C], which was cast before, under the same scale if that has one.

    Under a compiler `x` is cast by plain torch code before it is transposed: so the compiler need
    not keep `x` from forward to backward, but can make it again from what it keeps anyway, say an
    activation function from its input, in the kernel that casts. It then casts what that kernel
    has before it rounds to the dtype of `x`.

    Args:
        x: as for `quantize`; or the bytes that the cast before made, of which a compiler then keeps
            the transposed copy instead, one for all layers that read them.
        spec: of the cast before.
        scale: of the cast before; finer scales are others for columns.
    """
    if x.dtype in FLOAT8_MAX:
        return columns(Part(x, scale), spec)
    one_scale = spec.granularity is ScalingGranularity.TENSORWISE
    if one_scale and torch.compiler.is_compiling():
        row = Part(kernels.to_float8(x.detach(), scale, spec.dtype), scale)
        return columns(row, spec)
    known = scale if one_scale else None
    return quantize(x.detach(), spec, col=True, scale=known, fuse_amax=True).col


def padded(row: Part, spec: CastSpec, pad_rows: bool = True) -> Part:
    """Row data as a cast by `spec` pads them; as they are, if that is nothing."""
    data, scale = row
    to = BLOCK if spec.granularity is ScalingGranularity.BLOCK_128x128 else GEMM_ALIGNMENT
    bottom, right = -data.shape[0] % to if pad_rows else 0, -data.shape[1] % to
    if not bottom and not right:
        return row
    bytes_ = torch.nn.functional.pad(data.view(torch.uint8), (0, right, 0, bottom))
    if bottom and spec.granularity is ScalingGranularity.AXISWISE:
        scale = torch.nn.functional.pad(scale, (0, 0, 0, bottom), value=1.0)
    return Part(bytes_.view(data.dtype), scale)


def columns(row: Part, spec: CastSpec, after: Tensor | None = None) -> Part:
    """Column data of row data [R, C] that were cast by `spec`; `after` as `kernels.cast`.

    Bytes are transposed where columns have the scales of rows. Columns under `AXISWISE` have others
    than rows: the values are cast again. With powers of two as scales that changes no value but
    those that are tiny in their column; what was tiny in its row was rounded before.

    Raises:
        ValueError: under `BLOCK_1x128`, which no weight has.
    """
    if spec.granularity is ScalingGranularity.TENSORWISE:
        return Part(kernels.transpose_bytes(row.data, after=after), row.scale)
    if spec.granularity is ScalingGranularity.BLOCK_128x128:
        row = padded(row, spec)
        scale = row.scale[:, : row.data.shape[1] // BLOCK].t()
        scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))
        return Part(kernels.transpose_bytes(row.data, after=after), scale.contiguous())
    if spec.granularity is not ScalingGranularity.AXISWISE:
        raise ValueError(
            f"columns: got row data under {spec.granularity}, expected TENSORWISE, AXISWISE or "
            f"BLOCK_128x128; cast the tensor with `quantize(..., col=True)`"
        )
    row = Part(row.data, row.scale[: row.data.shape[0]])  # there may be more: see `padded`
    # Times a power of two a float8 value is exact in bfloat16, too.
    dtype = torch.bfloat16 if spec.power_of_2 else torch.float32
    values = dequantised(row, spec.granularity, dtype)
    return quantize(values, spec, col=True, after=after).col
