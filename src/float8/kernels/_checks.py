"""Argument checks that the kernels, their twins and their fakes share."""

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX, HIGH_PRECISION_DTYPES


def describe(x: object) -> str:
    """What an error message says of an argument: shape, dtype and device, or its type."""
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


def check_cast(x: Tensor, scale: Tensor, dtype: torch.dtype, row: bool, col: bool) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what ``cast`` cannot take."""
    check_high_precision("cast", x)
    if x.dim() != 2:
        raise ValueError(
            f"cast: x is {describe(x)}; expected 2 dimensions [R, C]. "
            f"Flatten the leading dimensions first: x.reshape(-1, x.shape[-1])."
        )
    if dtype not in FLOAT8_MAX:
        raise TypeError(
            f"cast: dtype is {dtype}; expected torch.float8_e4m3fn or torch.float8_e5m2."
        )
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        raise TypeError(
            f"cast: scale is {describe(scale)}; expected a float32 tensor with one element. "
            f"Convert it first, e.g. scale.to(torch.float32)."
        )
    if scale.numel() != 1:
        raise ValueError(
            f"cast: scale is {describe(scale)}; expected one element, the decode scale of the "
            f"whole tensor. Row and block scales are not taken by this kernel."
        )
    if scale.device != x.device:
        raise ValueError(
            f"cast: scale is on {scale.device} and x on {x.device}; expected one device. "
            f"Move the scale: scale.to(x.device)."
        )
    if not (row or col):
        raise ValueError("cast: got row=False, col=False; expected at least one of them True.")
