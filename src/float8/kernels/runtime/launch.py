"""Launching Triton kernels cheaply.

Triton's own launch inspects every argument, which costs several times what the launch does. Here
everything but the tensors of a launch is fixed when it is planned, so that all launches after the
first go straight to the compiled kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from float8.kernels.runtime import private
from float8.kernels.runtime.triton import HAS_TRITON

_PLAIN = (Tensor, torch.nn.Parameter)
_CACHED = private.current_device is not None and private.current_stream is not None
_DIRECT = HAS_TRITON and None not in (private.dispatch_modes, private.functorch_levels)

_binaries: dict[tuple[object, ...], Any] = {}
"""Compiled kernels, by all that Triton compiles anew for: shapes that differ share them."""


class Launch:
    """A Triton kernel with all its arguments but the tensors.

    The kernel takes its parameters in this order: tensors (None for one that it does not touch),
    integers, constants. Who keeps a `Launch` must use it for tensors of one set of dtypes. Triton
    specialises kernels on whether data starts at a multiple of 16 bytes; the first `inputs` tensors
    may be views that do not, all others are new allocations, which do, or the kernel does not
    specialise on them.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        device: torch.device,
        integers: tuple[int, ...],
        constants: tuple[object, ...],
        num_warps: int,
        *,
        inputs: int = 1,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.device = device
        self.rest = (*integers, *constants)
        self.num_warps = num_warps
        self.inputs = inputs
        # As Triton types and specialises integers.
        kinds = tuple((n == 1, n % 16 == 0, n >= 1 << 31) for n in integers)
        self._kind = (kernel, device, kinds, constants, num_warps)
        self._compiled: dict[tuple[bool, ...], Callable[..., object]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the device of the tensors, which need not be the current one."""
        device = self.device
        if device.type != "cuda":  # Triton's interpreter
            self._launch(tensors)
            return
        if not _CACHED:
            with torch.cuda.device(device):
                self._launch(tensors)
            return
        if device.index != private.current_device():
            with torch.cuda.device(device):
                self(*tensors)
            return
        # Addresses, since Triton would ask each tensor, and the driver about each answer.
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        aligned = tuple([not address or address % 16 == 0 for address in addresses[: self.inputs]])
        run = self._compiled.get(aligned)
        if run is None:
            dtypes = tuple(None if x is None else x.dtype for x in tensors)
            kind = (*self._kind, aligned, dtypes)
            binary = _binaries.get(kind)
            if binary is None:
                binary = self._launch(tensors)
                if binary is not None:
                    _binaries[kind] = binary
                return
            run = self._compiled[aligned] = binary[(self.programs, 1, 1)]
        run(*addresses, *self.rest, stream=private.current_stream(device.index))

    def _launch(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """Launch as Triton documents it; returns the compiled kernel (None in its interpreter)."""
        return self.kernel[(self.programs,)](*tensors, *self.rest, num_warps=self.num_warps)


def takes_triton_directly(*tensors: Tensor | None) -> bool:
    """Whether calling a Triton kernel on these does just what the registered op would do.

    Eager mode may then skip PyTorch's dispatcher, which costs more than a launch. Not under a
    compiler, a dispatch mode (fake tensors, tracing, counting) or a transform of torch.func, and
    not for tensor subclasses: these must see the op.
    """
    # A compiler must not see what follows, so this comes first.
    if not _DIRECT or torch.compiler.is_compiling():
        return False
    for x in tensors:
        # A lazily negated view (of a conjugate's imaginary part) is not what its memory says.
        if x is not None and not (x.is_cuda and type(x) in _PLAIN and not x.is_neg()):
            return False
    return private.dispatch_modes() == 0 and private.functorch_levels() is None


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Uninitialised, contiguous, of at most two dims, on the device of `like`."""
    device = like.device
    if (
        private.empty_strided_cuda is not None
        and _CACHED
        and device.type == "cuda"
        and device.index == private.current_device()
    ):
        strides = (shape[1], 1) if len(shape) == 2 else (1,) * len(shape)
        result: Tensor = private.empty_strided_cuda(shape, strides, dtype)
        return result
    return torch.empty(shape, dtype=dtype, device=device)
