"""Launching Triton kernels cheaply.

Triton's own launch inspects every argument, which costs several times what the launch does. Here
everything but the tensors of a launch is fixed when it is planned, so that all launches after the
first go straight to the compiled kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Launch:
    """A Triton kernel with all its arguments but the tensors.

    The kernel takes its parameters in this order: tensors, integers, constants. Who keeps a
    `Launch` must use it for tensors of one set of dtypes, and of one alignment to 16 bytes unless
    the kernel does not specialise on it.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        device: torch.device,
        integers: tuple[int, ...],
        constants: tuple[object, ...],
        num_warps: int,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.device = device
        self.rest = (*integers, *constants)
        self.num_warps = num_warps
        self._run: Callable[..., object] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the device of the tensors, which need not be the current one."""
        device = self.device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(*tensors)
        elif self._run is not None:
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            self._run(*tensors, *self.rest, stream=stream)
        else:
            compiled = self.kernel[(self.programs,)](*tensors, *self.rest, num_warps=self.num_warps)
            if compiled is not None:  # None in Triton's interpreter
                self._run = compiled[(self.programs, 1, 1)]


def is_aligned(x: Tensor) -> bool:
    """Whether the data starts at a multiple of 16 bytes, on which Triton specialises kernels."""
    return x.data_ptr() % 16 == 0
