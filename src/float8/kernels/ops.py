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

from float8.kernels._fakes import (
    amax_fake,
    cast_delayed_fake,
    cast_dynamic_fake,
    cast_fake,
    rms_norm_backward_fake,
    rms_norm_cast_fake,
    rms_norm_recast_fake,
    swiglu_backward_cast_fake,
    swiglu_cast_fake,
    transpose_fake,
)
from float8.kernels._triton import HAS_TRITON
from float8.kernels.amax import amax_reference, amax_triton
from float8.kernels.cast import (
    cast_dynamic_reference,
    cast_dynamic_triton,
    cast_reference,
    cast_triton,
)
from float8.kernels.cast_delayed import cast_delayed_reference, cast_delayed_triton
from float8.kernels.rms_norm import (
    rms_norm_cast_reference,
    rms_norm_cast_triton,
    rms_norm_recast_reference,
    rms_norm_recast_triton,
)
from float8.kernels.rms_norm_backward import (
    rms_norm_backward_reference,
    rms_norm_backward_triton,
)
from float8.kernels.swiglu import swiglu_cast_reference, swiglu_cast_triton
from float8.kernels.swiglu_backward import (
    swiglu_backward_cast_reference,
    swiglu_backward_cast_triton,
)
from float8.kernels.transpose import transpose_reference, transpose_triton

CastFunction = Callable[..., tuple[Tensor | None, Tensor | None]]
ListFunction = Callable[..., Any]


def _as_op(cast: CastFunction) -> Callable[..., list[Tensor]]:
    """Turn a twin of ``cast`` into the op's calling convention: positional, list of tensors."""

    def op(
        x: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        row: bool,
        col: bool,
        pad_rows: bool,
        after: Tensor | None = None,
    ) -> list[Tensor]:
        out = cast(x, scale, dtype, row=row, col=col, pad_rows=pad_rows)
        return [data for data in out if data is not None]

    return op


# The ops skip autograd (see _register), so their plain-torch bodies must not record either.


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


def _ignoring_after(transpose: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def op(data: Tensor, after: Tensor | None = None) -> Tensor:
        return transpose(data)

    return op


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
    plain=_without_autograd(amax_reference),
    triton=amax_triton,
    fake=amax_fake,
)
_register(
    "cast(Tensor x, Tensor scale, ScalarType dtype, bool row, bool col, bool pad_rows, "
    "Tensor? after=None) -> Tensor[]",
    plain=_without_autograd(_as_op(cast_reference)),
    triton=_as_op(cast_triton),
    fake=_as_op(cast_fake),
)
_register(
    "cast_dynamic(Tensor x, ScalarType dtype, bool row, bool col, bool pad_rows, "
    "bool round_to_power_of_2) -> Tensor[]",
    plain=_without_autograd(cast_dynamic_reference),
    triton=cast_dynamic_triton,
    fake=cast_dynamic_fake,
)
_register(
    "cast_delayed(Tensor x, Tensor scale, Tensor(a!) amax, ScalarType dtype, bool row, bool col, "
    "bool pad_rows, bool round_to_power_of_2, bool record, bool speculative=False) "
    "-> (Tensor, Tensor, Tensor)",
    plain=_without_autograd(_scale_row_col(cast_delayed_reference)),
    triton=_scale_row_col(cast_delayed_triton),
    fake=_scale_row_col(cast_delayed_fake),
)
_register(
    "swiglu_cast(Tensor gate, Tensor up, ScalarType dtype, Tensor? scale, Tensor(a!)? amax, "
    "bool round_to_power_of_2, bool record, bool speculative=False) -> (Tensor, Tensor)",
    plain=_without_autograd(_as_tuple(swiglu_cast_reference)),
    triton=_as_tuple(swiglu_cast_triton),
    fake=_as_tuple(swiglu_cast_fake),
)
_register(
    "swiglu_backward_cast(Tensor grad, Tensor gate, Tensor up, Tensor product_scale, "
    "ScalarType product_dtype, ScalarType dtype, Tensor? gate_scale, Tensor(a!)? gate_amax, "
    "Tensor? up_scale, Tensor(b!)? up_amax, bool round_to_power_of_2, bool record, "
    "bool speculative=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    plain=_without_autograd(_as_tuple(swiglu_backward_cast_reference)),
    triton=_as_tuple(swiglu_backward_cast_triton),
    fake=_as_tuple(swiglu_backward_cast_fake),
)
_register(
    "rms_norm_cast(Tensor x, Tensor weight, float eps, ScalarType dtype, "
    "Tensor? scale, Tensor(a!)? amax, bool round_to_power_of_2, bool record, "
    "bool speculative=False) -> (Tensor, Tensor, Tensor)",
    plain=_without_autograd(_as_tuple(rms_norm_cast_reference)),
    triton=_as_tuple(rms_norm_cast_triton),
    fake=_as_tuple(rms_norm_cast_fake),
)
_register(
    "rms_norm_recast(Tensor x, Tensor weight, Tensor rstd, Tensor scale, ScalarType dtype) "
    "-> Tensor",
    plain=_without_autograd(rms_norm_recast_reference),
    triton=rms_norm_recast_triton,
    fake=rms_norm_recast_fake,
)
_register(
    "rms_norm_backward(Tensor[] grads, Tensor x, Tensor weight, Tensor rstd, "
    "Tensor? residual_grad) -> (Tensor, Tensor)",
    plain=_without_autograd(rms_norm_backward_reference),
    triton=rms_norm_backward_triton,
    fake=rms_norm_backward_fake,
)
_register(
    "transpose(Tensor data, Tensor? after=None) -> Tensor",
    plain=_without_autograd(_ignoring_after(transpose_reference)),
    triton=_ignoring_after(transpose_triton),
    fake=transpose_fake,
)
