"""Argument checks that the kernels share."""

import torch
from torch import Tensor

from float8.formats import HIGH_PRECISION_DTYPES


def describe(x: object) -> str:
    """Describe an argument in an error message: shape, dtype and device, or its type."""
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"
    return f"{x!r} ({type(x).__name__})"


def check_high_precision(name: str, x: Tensor) -> None:
    """Raise ``TypeError`` unless ``x`` is a tensor of a dtype that the kernels read."""
    if not isinstance(x, Tensor) or x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{name}: x is {describe(x)}; expected a float32, bfloat16 or float16 tensor. "
            f"Convert it first, e.g. x.to(torch.bfloat16)."
        )


def check_scalars(x: Tensor, **scalars: Tensor | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what cannot be scale or amax of ``x``."""
    for name, scalar in scalars.items():
        if scalar is None:
            continue
        if not isinstance(scalar, Tensor) or scalar.dtype != torch.float32:
            raise TypeError(
                f"cast: {name} is {describe(scalar)}; expected a float32 tensor with one element. "
                f"Convert it first, e.g. {name}.to(torch.float32)."
            )
        if scalar.numel() != 1:
            raise ValueError(
                f"cast: {name} is {describe(scalar)}; expected one element, that of the whole "
                f"tensor. Row and block scales are not taken by this kernel."
            )
        if scalar.device != x.device:
            raise ValueError(
                f"cast: {name} is on {scalar.device} and x on {x.device}; expected one device. "
                f"Move it: {name}.to(x.device)."
            )


def check_same(op: str, **tensors: Tensor) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless all are 2-D and alike in all but values."""
    (first_name, first), *others = tensors.items()
    check_high_precision(op, first)
    if first.dim() != 2 or first.numel() == 0:
        raise ValueError(f"{op}: {first_name} is {describe(first)}; expected [R, C], not empty")
    for name, x in others:
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"{op}: {name} is {describe(x)} and {first_name} {describe(first)}; expected "
                f"the same shape, dtype and device"
            )
