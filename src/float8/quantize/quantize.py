"""The one door for casts: choose the scale of a tensor, cast it, lay it out."""

from collections.abc import Callable

import torch
from torch import Tensor

from float8 import kernels
from float8.config import ScalingGranularity
from float8.formats import GEMM_ALIGNMENT
from float8.quantize.history import DelayedScale
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import CastSpec, Part, Quantized

FINER: dict[ScalingGranularity, Callable[..., Quantized]] = {}
"""How to cast under finer scales than one per tensor; each entry takes what `quantize` takes."""


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
        scale: the scale, where it is known already; nothing else chooses one then.
        reduce: takes the amax of `x` and returns that of the whole tensor, of which `x` is the part
            of this rank; called where the scale comes from `x`.
        after: what a compiler must have computed first, see `kernels.cast`; where `scale` is given.
        fuse_amax: let a compiler take the amax in the kernel that produces `x`. Without effect in
            eager mode, where that kernel has run.

    Returns:
        Row and column data as asked for, padded with zeros to multiples of 16 where a GEMM wants
        that. Scales are new tensors, which a sync does not change.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: `x` is not 2-D, no layout is asked for, or both `state` and `reduce` are given.
        NotImplementedError: nothing casts under the granularity of `spec`, or not by a history.
    """
    if state is not None and reduce is not None:
        raise ValueError("quantize: got state and reduce, expected one: a history is reduced later")
    if spec.granularity is not ScalingGranularity.TENSORWISE:
        if spec.granularity not in FINER or state is not None:
            raise NotImplementedError(
                f"quantize: got {spec.granularity}, with{'out' * (state is None)} a history, "
                f"expected TENSORWISE, or one of {list(FINER)} without"
            )
        return FINER[spec.granularity](
            x, spec, row=row, col=col, pad_rows=pad_rows, scale=scale, reduce=reduce, after=after
        )
    if scale is None and state is not None:
        scale, row_data, col_data = kernels.cast_delayed(
            x, spec, state, row=row, col=col, pad_rows=pad_rows, record=record
        )
    elif scale is None and reduce is None and not (fuse_amax and torch.compiler.is_compiling()):
        scale, row_data, col_data = kernels.cast_dynamic(
            x, spec, row=row, col=col, pad_rows=pad_rows
        )
    else:
        if scale is None:
            amax = kernels.amax(x)
            amax = amax if reduce is None else reduce(amax)
            scale = amax_to_scale(amax, spec.dtype, spec.power_of_2)
        row_data, col_data = kernels.cast(
            x, scale, spec.dtype, row=row, col=col, pad_rows=pad_rows, after=after
        )
    return Quantized(
        None if row_data is None else Part(row_data, scale),
        None if col_data is None else Part(col_data, scale),
        spec,
    )


def recast(x: Tensor, spec: CastSpec, scale: Tensor) -> Part:
    """Column data of `x` [R, C], which was cast before, under the same scale.

    Under a compiler `x` is cast by plain torch code before it is transposed: so the compiler need
    not keep `x` from forward to backward, but can make it again from what it keeps anyway, say an
    activation function from its input, in the kernel that casts. It then casts what that kernel
    has before it rounds to the dtype of `x`.

    Args:
        x: as for `quantize`.
        spec: of the cast before.
        scale: of the cast before.
    """
    if torch.compiler.is_compiling() and spec.granularity is ScalingGranularity.TENSORWISE:
        return columns(Part(kernels.to_float8(x.detach(), scale, spec.dtype), scale))
    made = quantize(x, spec, col=True, scale=column_scale(scale, spec)).col
    assert made is not None
    return made


def column_scale(scale: Tensor, spec: CastSpec) -> Tensor | None:
    """The scale of row data as that of column data; None where those have others of their own."""
    return scale if spec.granularity is ScalingGranularity.TENSORWISE else None


def padded(row: Part) -> Part:
    """Row data with both dims padded with zeros to multiples of 16; as they are, if they are."""
    data = row.data
    bottom, right = -data.shape[0] % GEMM_ALIGNMENT, -data.shape[1] % GEMM_ALIGNMENT
    if not bottom and not right:
        return row
    bytes_ = torch.nn.functional.pad(data.view(torch.uint8), (0, right, 0, bottom))
    return Part(bytes_.view(data.dtype), row.scale)


def columns(row: Part, after: Tensor | None = None) -> Part:
    """Column data of row data: the bytes transposed; `after` as `kernels.cast`.

    Raises:
        ValueError: there is more than one scale, so that columns have others than rows.
    """
    if row.scale.numel() != 1:
        raise ValueError(
            f"columns: got scales of shape {tuple(row.scale.shape)}, expected one element; columns "
            f"have scales of their own: cast the tensor with `quantize(..., col=True)`"
        )
    return Part(kernels.transpose_bytes(row.data, after=after), row.scale)
