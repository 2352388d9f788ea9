"""The kernels as PyTorch ops: ``torch.ops.float8.amax``, ``.cast`` and ``.transpose``.

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

from float8.kernels._checks import check_cast, check_high_precision
from float8.kernels._triton import HAS_TRITON
from float8.kernels.amax import amax_reference, amax_triton
from float8.kernels.cast import allocate, cast_reference, cast_triton
from float8.kernels.transpose import check_transpose, transpose_reference, transpose_triton

CastFunction = Callable[..., tuple[Tensor | None, Tensor | None]]


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


def _transpose_plain(data: Tensor) -> Tensor:
    return transpose_reference(data.detach())


def _amax_fake(x: Tensor) -> Tensor:
    check_high_precision("amax", x)
    return x.new_empty((), dtype=torch.float32)


def _cast_fake(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, row: bool, col: bool, pad_rows: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    check_cast(x, scale, dtype, row, col)
    return allocate(x, dtype, row, col, pad_rows)


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
    "transpose(Tensor data) -> Tensor",
    plain=_transpose_plain,
    triton=transpose_triton,
    fake=_transpose_fake,
)
