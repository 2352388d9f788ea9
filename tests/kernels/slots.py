"""Slots of tensors that a test has at hand."""

from torch import Tensor

from float8.kernels.runtime.launch import Slot


def like(x: Tensor) -> Slot:
    return Slot(x.dtype, x.shape, x.stride(), x.device)
