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
    `Launch` must use it for tensors of one set of dtypes. Triton specialises kernels on whether
    data starts at a multiple of 16 bytes; the first `inputs` tensors may be views that do not, all
    others are new allocations, which do, or the kernel does not specialise on them.
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
        self._compiled: dict[tuple[bool, ...], Callable[..., object]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the device of the tensors, which need not be the current one."""
        device = self.device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(*tensors)
            return
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        aligned = tuple([address % 16 == 0 for address in addresses[: self.inputs]])
        run = self._compiled.get(aligned)
        if run is not None:
            # Triton would ask each tensor, and the driver about each answer.
            run(*addresses, *self.rest, stream=torch._C._cuda_getCurrentRawStream(device.index))
            return
        compiled = self.kernel[(self.programs,)](*tensors, *self.rest, num_warps=self.num_warps)
        if compiled is not None:  # None in Triton's interpreter
            self._compiled[aligned] = compiled[(self.programs, 1, 1)]
