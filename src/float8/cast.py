"""High precision -> the operand of a float8 GEMM: choose the scale, cast, lay out."""

from typing import NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.scaling import DelayedScale, amax_to_scale


class Operand(NamedTuple):
    """A [R, C] tensor in float8, in the layouts that were asked for."""

    row: Tensor | None
    """[R or ceil16(R), ceil16(C)] float8, contiguous: contracted over C."""

    col: Tensor | None
    """[ceil16(C), ceil16(R)] float8, contiguous, the transposed copy: contracted over R."""

    scale: Tensor
    """0-dim float32 decode scale."""


def dynamic_scale(x: Tensor, dtype: torch.dtype, round_to_power_of_2: bool) -> Tensor:
    """The scale from this tensor's own amax: 0-dim float32."""
    return amax_to_scale(kernels.amax(x), dtype, round_to_power_of_2)


def delayed_scale(
    x: Tensor, dtype: torch.dtype, round_to_power_of_2: bool, state: DelayedScale, record: bool
) -> Tensor:
    """The scale from the history, or from the data as long as there is no history.

    Args:
        x: the tensor to be cast.
        dtype: float8 format.
        round_to_power_of_2: as in `amax_to_scale`, for a scale taken from the data.
        state: this cast's state; `state.amax` is raised to the amax of `x` if `record`.
        record: whether the step counts: False in eval mode.

    Returns:
        0-dim float32, a new tensor: a sync does not change it.
    """
    amax = kernels.amax(x)
    if record:
        state.amax.copy_(torch.maximum(state.amax, amax))
    from_data = amax_to_scale(amax, dtype, round_to_power_of_2)
    # UNKNOWN_SCALE as a literal, for dynamic=True: see amax_to_scale.
    return torch.where(state.scale == 0.0, from_data, state.scale)


def cast_operand(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool = False,
    col: bool = False,
    pad_rows: bool = False,
) -> Operand:
    """Cast `x` [R, C] with a known scale to row data, column data or both, in one read of `x`.

    Args:
        x: [R, C] float32, bfloat16 or float16, any strides.
        scale: 0-dim float32 decode scale.
        dtype: float8 format.
        row: make row data.
        col: make column data.
        pad_rows: pad R of the row data to 16: needed where R is a GEMM's output feature dim.
    """
    row_data, col_data = kernels.cast(x, scale, dtype, row=row, col=col, pad_rows=pad_rows)
    return Operand(row_data, col_data, scale)
