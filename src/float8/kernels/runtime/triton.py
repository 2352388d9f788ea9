"""Triton, or a stand-in that lets the kernel files import where Triton is not installed.

Triton has no builds for some platforms, and float8 on a CPU does not need it.
"""

from collections.abc import Callable
from typing import Any

jit: Callable[..., Callable[..., Any]]
tl: Any
TensorDescriptor: Any

try:
    import triton
    import triton.language as tl  # type: ignore[no-redef]
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[no-redef]

    HAS_TRITON = True
    jit = triton.jit
except ImportError:

    class _Language:
        """Stand in for what signatures of kernels need that are defined and never launched."""

        constexpr = object

    HAS_TRITON = False
    tl = _Language
    TensorDescriptor = None

    def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
        """Leave the kernel as it is."""
        return fn if fn is not None else lambda fn: fn


def interpreting() -> bool:
    """Tell whether Triton kernels run in its interpreter (``TRITON_INTERPRET=1``)."""
    return HAS_TRITON and bool(triton.knobs.runtime.interpret)
