"""Registering kernels as PyTorch ops, ``torch.ops.float8.*``.

The Library API rather than the ``custom_op`` decorator, which costs several times as much per call
in eager mode. CPU runs the plain-torch twins; CUDA runs Triton, or the twins where Triton is not
installed (a warning says so once). The ops are not differentiable: their results never require
grad. To AOTAutograd they are opaque; Inductor runs their Triton code, see ``ir``.
"""

import functools
import hashlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from float8.kernels.runtime import private
from float8.kernels.runtime.ir import lower
from float8.kernels.runtime.triton import HAS_TRITON


def _hash_of_kernels() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.blake2b(b"".join(f.read_bytes() for f in files), digest_size=8).hexdigest()


BUILD = _hash_of_kernels()
"""An argument of ops that Inductor lowers, which does nothing: compilers keep what they generate on
disk, by the ops and their arguments, and generated code holds our kernels' source."""

# Any, because torch leaves this class untyped.
_library: Any = torch.library.Library("float8", "DEF")  # type: ignore[no-untyped-call]


def register(
    schema: str,
    *,
    plain: Callable[..., Any],
    triton: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Define an op.

    Args:
        schema: of the op.
        plain: its plain-torch twin, takes and returns what the schema says.
        triton: its Triton code, likewise; run by Inductor too, on `IRTensor`s.
        fake: makes uninitialised results.
    """
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,)).split("::")[-1]
    plain = torch.no_grad()(plain)  # the op skips autograd, so its body must not record either
    _library.impl(name, plain, "CPU")
    _library.impl(name, triton if HAS_TRITON else without_triton(plain), "CUDA")
    # Straight to the kernel: saves the eager autograd wrapper, and its results, which carry no
    # gradient, then don't claim to.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    op = getattr(torch.ops.float8, name).default

    @functools.wraps(fake)
    def traced(*args: Any) -> Any:
        _tell_inductor(op, triton)
        return fake(*args)

    torch.library.register_fake(f"float8::{name}", traced, lib=_library)


_told: set[Any] = set()


def _tell_inductor(op: Any, body: Callable[..., Any]) -> None:
    """Register how an op is lowered, the first time that Inductor traces it.

    Not before: importing Inductor takes seconds. Where its interface is another one than expected,
    the op stays opaque.
    """
    if op in _told or "torch._inductor.lowering" not in sys.modules:
        return
    _told.add(op)
    if HAS_TRITON and not private.PLAIN_LAUNCH:
        try:
            lower(op, body)
        except (AttributeError, ImportError, TypeError) as error:
            warnings.warn(f"float8: Inductor calls {op} through PyTorch: {error}", stacklevel=2)


@functools.cache
def _warn_without_triton() -> None:
    warnings.warn(
        "float8: Triton cannot be imported, so float8 casts on the GPU run as several plain "
        "PyTorch kernels, which is several times slower. Install triton to avoid this.",
        stacklevel=2,
    )


def without_triton(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, saying so on its first use rather than on import."""

    def op(*args: object) -> Any:
        _warn_without_triton()
        return plain(*args)

    return op
