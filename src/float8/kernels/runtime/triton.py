"""Triton, or stand-ins where it is not installed, and properties of devices that kernels need."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

jit: Callable[..., Any]
gluon_jit: Callable[..., Any]

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
    jit = triton.jit
except ImportError:
    # Signatures of kernels need these names; without Triton no kernel is launched.
    HAS_TRITON, tl, TensorDescriptor = False, types.SimpleNamespace(constexpr=int), None

    def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
        """Decorator in place of `triton.jit`, with or without options, that returns `fn` itself."""
        return fn if fn is not None else lambda fn: fn


try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    HAS_GLUON, gluon_jit = True, gluon.jit
    # Renamed in Triton 3.8.
    async_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
except ImportError:
    HAS_GLUON, gluon_jit = False, jit
    gl, hopper, GluonDescriptor, async_load = types.SimpleNamespace(constexpr=int), None, None, None


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 4 on the CPU, for Triton's interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_float8_conversion(device: torch.device) -> bool:
    """Return whether kernels may convert float32 to float8 by an instruction of ``device``.

    True for NVIDIA GPUs from compute capability 9.0 on; on 8.9 the assembler rounds twice, through
    float16. False in Triton's interpreter (3.6), which gets halves, subnormals and NaN wrong.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    interpreting = HAS_TRITON and bool(triton.knobs.runtime.interpret)
    return not interpreting and torch.cuda.get_device_capability(device) >= (9, 0)
