"""Argument checks that the kernels share."""

from torch import Tensor

from float8.formats import HIGH_PRECISION_DTYPES


def describe(x: object) -> str:
    """Describe an argument in an error message: shape, dtype and device, or its type."""
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"
    return f"{x!r} ({type(x).__name__})"


def check_high_precision(op: str, x: Tensor) -> None:
    """Raise ``TypeError`` unless ``x`` is a tensor of a dtype that the kernels read."""
    if not isinstance(x, Tensor) or x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{op}: x is {describe(x)}; expected a float32, bfloat16 or float16 tensor. "
            f"Convert it first, e.g. x.to(torch.bfloat16)."
        )
