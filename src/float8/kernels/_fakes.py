"""Fakes of the ops: the checks, and the shapes and dtypes of the results, for compilers."""

import torch
from torch import Tensor

from float8.kernels._checks import check_cast, check_high_precision, check_scalar
from float8.kernels.cast import allocate, pack
from float8.kernels.rms_norm import check_rms_norm
from float8.kernels.rms_norm_backward import check_rms_norm_backward
from float8.kernels.swiglu import check_swiglu
from float8.kernels.swiglu_backward import allocate_gradients, check_swiglu_backward
from float8.kernels.transpose import check_transpose


def amax_fake(x: Tensor) -> Tensor:
    """See `amax`."""
    check_high_precision("amax", x)
    return x.new_empty((), dtype=torch.float32)


def cast_fake(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, row: bool, col: bool, pad_rows: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """See `cast`."""
    check_cast(x, dtype, row, col)
    check_scalar("scale", scale, x)
    return allocate(x, dtype, row, col, pad_rows)


def cast_dynamic_fake(
    x: Tensor, dtype: torch.dtype, row: bool, col: bool, pad_rows: bool, round_to_power_of_2: bool
) -> list[Tensor]:
    """See `cast_dynamic`."""
    check_cast(x, dtype, row, col)
    scale = x.new_empty((), dtype=torch.float32)
    return pack(scale, allocate(x, dtype, row, col, pad_rows))


def cast_delayed_fake(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """See `cast_delayed`."""
    check_scalar("scale", scale, x)
    check_scalar("amax", amax, x)
    return cast_dynamic_fake(x, dtype, row, col, pad_rows, round_to_power_of_2)


def swiglu_cast_fake(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """See `swiglu_cast`."""
    check_swiglu(gate, up, scale, amax)
    return cast_dynamic_fake(gate, dtype, True, False, False, round_to_power_of_2)


def swiglu_backward_cast_fake(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    product_scale: Tensor,
    product_dtype: torch.dtype,
    dtype: torch.dtype,
    gate_scale: Tensor | None,
    gate_amax: Tensor | None,
    up_scale: Tensor | None,
    up_amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """See `swiglu_backward_cast`."""
    states = (gate_scale, gate_amax, up_scale, up_amax)
    check_swiglu_backward(grad, gate, up, product_scale, states)
    return allocate_gradients(grad, product_dtype, dtype)


def rms_norm_cast_fake(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """See `rms_norm_cast`."""
    check_rms_norm(x, weight, scale, amax)
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return [rstd, *cast_dynamic_fake(x, dtype, True, False, False, round_to_power_of_2)]


def rms_norm_recast_fake(
    x: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """See `rms_norm_recast`."""
    check_rms_norm(x, weight, None, None)
    check_scalar("scale", scale, x)
    _, col = allocate(x, dtype, False, True, False)
    assert col is not None
    return col


def rms_norm_backward_fake(
    grads: list[Tensor], x: Tensor, weight: Tensor, rstd: Tensor, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `rms_norm_backward`."""
    check_rms_norm_backward(grads, x, weight, rstd, residual_grad)
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def transpose_fake(data: Tensor, after: Tensor | None = None) -> Tensor:
    """See `transpose_bytes`."""
    check_transpose(data)
    R, C = data.shape
    return data.new_empty((C, R))
