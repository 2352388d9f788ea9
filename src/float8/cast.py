"""High precision -> the operand of a float8 GEMM: choose the scale, cast, lay out."""

from typing import NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.formats import GEMM_ALIGNMENT
from float8.scaling import DelayedScale, amax_to_scale


class Operand(NamedTuple):
    """A [R, C] tensor in float8, in the layouts that were asked for."""

    row: Tensor | None
    """[R or ceil16(R), ceil16(C)] float8, contiguous: contracted over C."""

    col: Tensor | None
    """[ceil16(C), ceil16(R)] float8, contiguous, the transposed copy: contracted over R."""

    scale: Tensor
    """0-dim float32 decode scale."""

    amax: Tensor | None = None
    """0-dim float32: what delayed scaling still has to record of it at each use, if anything."""


class CastPlan(NamedTuple):
    """How one tensor is cast: what its `CastConfig` comes down to."""

    dtype: torch.dtype
    """The float8 format."""

    delayed: bool
    """Whether the scale comes from a history; else from the tensor itself."""

    round_to_power_of_2: bool
    speculative: bool = False
    """Whether a scale from the history gives way to one from the tensor that saturates nothing."""


def quantize(
    x: Tensor,
    plan: CastPlan,
    state: DelayedScale | None,
    *,
    row: bool = False,
    col: bool = False,
    pad_rows: bool = False,
    record: bool = False,
) -> Operand:
    """Choose the scale of `x` by its scaling type and cast.

    Args:
        x: [R, C] float32, bfloat16 or float16, any strides.
        plan: format and scaling.
        state: with delayed scaling, its state: the scale is taken from it as long as there is
            one, and its amax is raised to that of `x` if `record`.
        row: make row data.
        col: make column data.
        pad_rows: pad R of the row data to 16: needed where R is a GEMM's output feature dim.
        record: whether the history learns of this tensor.

    Returns:
        The operand; its scale is a new tensor, which a sync does not change.
    """
    dtype, round_to_power_of_2 = plan.dtype, plan.round_to_power_of_2
    if state is not None:
        done = kernels.cast_delayed(
            x,
            state.scale,
            state.amax,
            dtype,
            row=row,
            col=col,
            pad_rows=pad_rows,
            round_to_power_of_2=round_to_power_of_2,
            record=record,
            speculative=plan.speculative,
        )
        return Operand(done.row, done.col, done.scale)
    if torch.compiler.is_compiling():
        # Apart, so that Inductor takes the amax in the kernel that produces x.
        scale = amax_to_scale(kernels.amax(x), dtype, round_to_power_of_2)
        return cast_operand(x, scale, dtype, row=row, col=col, pad_rows=pad_rows)
    done = kernels.cast_dynamic(
        x, dtype, row=row, col=col, pad_rows=pad_rows, round_to_power_of_2=round_to_power_of_2
    )
    return Operand(done.row, done.col, done.scale)


def cast_operand(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool = False,
    col: bool = False,
    pad_rows: bool = False,
    after: Tensor | None = None,
) -> Operand:
    """Cast `x` [R, C] with a known scale to row data, column data or both, in one read of `x`.

    Args:
        x: [R, C] float32, bfloat16 or float16, any strides.
        scale: 0-dim float32 decode scale.
        dtype: float8 format.
        row: make row data.
        col: make column data.
        pad_rows: pad R of the row data to 16: needed where R is a GEMM's output feature dim.
        after: what a compiler must have computed first, see `kernels.cast`.
    """
    row_data, col_data = kernels.cast(
        x, scale, dtype, row=row, col=col, pad_rows=pad_rows, after=after
    )
    return Operand(row_data, col_data, scale)


def padded(row: Tensor) -> Tensor:
    """Row data with both dims padded with zeros to multiples of 16; as it is, if they are."""
    bottom, right = -row.shape[0] % GEMM_ALIGNMENT, -row.shape[1] % GEMM_ALIGNMENT
    if not bottom and not right:
        return row
    bytes_ = torch.nn.functional.pad(row.view(torch.uint8), (0, right, 0, bottom))
    return bytes_.view(row.dtype)


def columns(row: Tensor, after: Tensor | None = None) -> Tensor:
    """Column data of row data: under one scale, the bytes transposed; `after` as `kernels.cast`."""
    return kernels.transpose_bytes(padded(row), after=after)
