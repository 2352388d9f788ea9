"""The kernels as PyTorch ops, ``torch.ops.float8.*``.

The Library API rather than the ``custom_op`` decorator, which costs several times as much per call
in eager mode. CPU runs the plain-torch twins; CUDA runs Triton, or the twins where Triton is not
installed (a warning says so once). The ops are opaque to ``torch.compile`` and not differentiable:
their results never require grad.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from float8.kernels._checks import check_cast, check_high_precision, check_scalar
from float8.kernels._triton import HAS_TRITON
from float8.kernels.amax import amax_reference, amax_triton
from float8.kernels.cast import (
    allocate,
    cast_delayed_reference,
    cast_delayed_triton,
    cast_dynamic_reference,
    cast_dynamic_triton,
    cast_reference,
    cast_triton,
    pack,
)
from float8.kernels.rms_norm import (
    check_rms_norm,
    rms_norm_cast_reference,
    rms_norm_cast_triton,
)
from float8.kernels.swiglu import check_swiglu, swiglu_cast_reference, swiglu_cast_triton
from float8.kernels.swiglu_backward import (
    allocate_gradients,
    check_swiglu_backward,
    swiglu_backward_cast_reference,
    swiglu_backward_cast_triton,
)
from float8.kernels.transpose import check_transpose, transpose_reference, transpose_triton

CastFunction = Callable[..., tuple[Tensor | None, Tensor | None]]
ListFunction = Callable[..., Any]


def _as_op(cast: CastFunction) -> Callable[..., list[Tensor]]:
    """Turn a twin of ``cast`` into the op's calling convention: positional, list of tensors."""

    def op(
        x: Tensor, scale: Tensor, dtype: torch.dtype, row: bool, col: bool, pad_rows: bool
    ) -> list[Tensor]:
        out = cast(x, scale, dtype, row=row, col=col, pad_rows=pad_rows)
        return [data for data in out if data is not None]

    return op


# The ops skip autograd (see _register), so their plain-torch bodies must not record either.


def _amax_plain(x: Tensor) -> Tensor:
    return amax_reference(x.detach())


def _cast_plain(
    x: Tensor, scale: Tensor, dtype: torch.dtype, row: bool, col: bool, pad_rows: bool
) -> list[Tensor]:
    return _as_op(cast_reference)(x.detach(), scale.detach(), dtype, row, col, pad_rows)


def _without_autograd(plain: ListFunction) -> ListFunction:
    def op(*args: Any) -> Any:
        with torch.no_grad():
            return plain(*args)

    return op


# Ops that write one of their arguments must return a fixed number of tensors: the compiler's
# functionalisation takes no list. An empty one stands for a layout that was not asked for.


def _as_tuple(function: ListFunction) -> ListFunction:
    def op(*args: Any) -> Any:
        return tuple(function(*args))

    return op


def _scale_row_col(function: ListFunction) -> ListFunction:
    def op(*args: Any) -> Any:
        x, (row, col) = args[0], args[4:6]
        scale, *data = function(*args)
        empty = x.new_empty(0)
        return scale, data[0] if row else empty, data[-1] if col else empty

    return op


def _rstd_scale_row_col(function: ListFunction) -> ListFunction:
    def op(*args: Any) -> Any:
        x, col = args[0], args[4]
        rstd, scale, *data = function(*args)
        return rstd, scale, data[0], data[1] if col else x.new_empty(0)

    return op


def _transpose_plain(data: Tensor) -> Tensor:
    return transpose_reference(data.detach())


def _amax_fake(x: Tensor) -> Tensor:
    check_high_precision("amax", x)
    return x.new_empty((), dtype=torch.float32)


def _cast_fake(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, row: bool, col: bool, pad_rows: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    check_cast(x, dtype, row, col)
    check_scalar("scale", scale, x)
    return allocate(x, dtype, row, col, pad_rows)


def _cast_dynamic_fake(
    x: Tensor, dtype: torch.dtype, row: bool, col: bool, pad_rows: bool, round_to_power_of_2: bool
) -> list[Tensor]:
    check_cast(x, dtype, row, col)
    scale = x.new_empty((), dtype=torch.float32)
    return pack(scale, allocate(x, dtype, row, col, pad_rows))


def _cast_delayed_fake(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    round_to_power_of_2: bool,
    record: bool,
) -> list[Tensor]:
    check_scalar("scale", scale, x)
    check_scalar("amax", amax, x)
    return _cast_dynamic_fake(x, dtype, row, col, pad_rows, round_to_power_of_2)


def _swiglu_cast_fake(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
) -> list[Tensor]:
    check_swiglu(gate, up, scale, amax)
    return _cast_dynamic_fake(gate, dtype, True, False, False, round_to_power_of_2)


def _swiglu_backward_cast_fake(
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
) -> list[Tensor]:
    states = (gate_scale, gate_amax, up_scale, up_amax)
    check_swiglu_backward(grad, gate, up, product_scale, states)
    return allocate_gradients(grad, product_dtype, dtype)


def _rms_norm_cast_fake(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    col: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
) -> list[Tensor]:
    check_rms_norm(x, weight, scale, amax)
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return [rstd, *_cast_dynamic_fake(x, dtype, True, col, False, round_to_power_of_2)]


def _transpose_fake(data: Tensor) -> Tensor:
    check_transpose(data)
    R, C = data.shape
    return data.new_empty((C, R))


@functools.cache
def _warn_without_triton() -> None:
    warnings.warn(
        "float8: Triton cannot be imported, so float8 casts on the GPU run as several plain "
        "PyTorch kernels, which is several times slower. Install triton to avoid this.",
        stacklevel=2,
    )


def _without_triton(plain: Callable[..., object]) -> Callable[..., object]:
    """``plain``, saying so on its first use rather than on import."""

    def op(*args: object) -> object:
        _warn_without_triton()
        return plain(*args)

    return op


# Any, because torch leaves this class untyped.
_library: Any = torch.library.Library("float8", "DEF")  # type: ignore[no-untyped-call]


def _register(
    schema: str,
    *,
    plain: Callable[..., object],
    triton: Callable[..., object],
    fake: Callable[..., object],
) -> None:
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,)).split("::")[-1]
    _library.impl(name, plain, "CPU")
    _library.impl(name, triton if HAS_TRITON else _without_triton(plain), "CUDA")
    # Straight to the kernel: saves the eager autograd wrapper, and its results, which carry no
    # gradient, then don't claim to.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"float8::{name}", fake, lib=_library)


_register(
    "amax(Tensor x) -> Tensor",
    plain=_amax_plain,
    triton=amax_triton,
    fake=_amax_fake,
)
_register(
    "cast(Tensor x, Tensor scale, ScalarType dtype, bool row, bool col, bool pad_rows) -> Tensor[]",
    plain=_cast_plain,
    triton=_as_op(cast_triton),
    fake=_as_op(_cast_fake),
)
_register(
    "cast_dynamic(Tensor x, ScalarType dtype, bool row, bool col, bool pad_rows, "
    "bool round_to_power_of_2) -> Tensor[]",
    plain=_without_autograd(cast_dynamic_reference),
    triton=cast_dynamic_triton,
    fake=_cast_dynamic_fake,
)
_register(
    "cast_delayed(Tensor x, Tensor scale, Tensor(a!) amax, ScalarType dtype, bool row, bool col, "
    "bool pad_rows, bool round_to_power_of_2, bool record) -> (Tensor, Tensor, Tensor)",
    plain=_without_autograd(_scale_row_col(cast_delayed_reference)),
    triton=_scale_row_col(cast_delayed_triton),
    fake=_scale_row_col(_cast_delayed_fake),
)
_register(
    "swiglu_cast(Tensor gate, Tensor up, ScalarType dtype, Tensor? scale, Tensor(a!)? amax, "
    "bool round_to_power_of_2, bool record) -> (Tensor, Tensor)",
    plain=_without_autograd(_as_tuple(swiglu_cast_reference)),
    triton=_as_tuple(swiglu_cast_triton),
    fake=_as_tuple(_swiglu_cast_fake),
)
_register(
    "swiglu_backward_cast(Tensor grad, Tensor gate, Tensor up, Tensor product_scale, "
    "ScalarType product_dtype, ScalarType dtype, Tensor? gate_scale, Tensor(a!)? gate_amax, "
    "Tensor? up_scale, Tensor(b!)? up_amax, bool round_to_power_of_2, bool record) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    plain=_without_autograd(_as_tuple(swiglu_backward_cast_reference)),
    triton=_as_tuple(swiglu_backward_cast_triton),
    fake=_as_tuple(_swiglu_backward_cast_fake),
)
_register(
    "rms_norm_cast(Tensor x, Tensor weight, float eps, ScalarType dtype, bool col, "
    "Tensor? scale, Tensor(a!)? amax, bool round_to_power_of_2, bool record) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    plain=_without_autograd(_rstd_scale_row_col(rms_norm_cast_reference)),
    triton=_rstd_scale_row_col(rms_norm_cast_triton),
    fake=_rstd_scale_row_col(_rms_norm_cast_fake),
)
_register(
    "transpose(Tensor data) -> Tensor",
    plain=_transpose_plain,
    triton=transpose_triton,
    fake=_transpose_fake,
)
