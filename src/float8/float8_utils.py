"""Helpers of torchao with the same meaning here; those of casts and scales have another."""

import torch
from torch import Tensor

from float8.config import e4m3_dtype, e5m2_dtype

__all__ = ["FP8_TYPES", "compute_error", "e4m3_dtype", "e5m2_dtype"]

FP8_TYPES = {e4m3_dtype, e5m2_dtype}

_OTHER_SCALES = (
    *("amax_history_to_scale", "amax_history_to_scale_stack", "amax_to_scale", "tensor_to_amax"),
    *("tensor_to_scale", "to_fp8_saturated"),
)


@torch.no_grad()
def compute_error(x: Tensor, y: Tensor) -> Tensor:
    """Return the SQNR in dB of `y` as an approximation of `x`, both of any shape; 0-dim."""
    norm = torch.linalg.vector_norm
    return 20 * torch.log10(norm(x) / norm(x - y))


def __getattr__(name: str) -> object:
    if name in _OTHER_SCALES:
        raise ImportError(
            f"float8.float8_utils: got {name!r}, expected one of {', '.join(__all__)}: torchao's "
            f"scales multiply before the cast, those of float8 after it; use "
            f"Float8Tensor.from_high_precision(x)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
