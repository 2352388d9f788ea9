"""Helpers of torchao with the same meaning here. Those of casts and scales have another.

torchao's scales multiply before the cast, those of float8 after it.
"""

import torch
from torch import Tensor

from float8.config import e4m3_dtype, e5m2_dtype

__all__ = ["FP8_TYPES", "compute_error", "e4m3_dtype", "e5m2_dtype"]

FP8_TYPES = {e4m3_dtype, e5m2_dtype}


@torch.no_grad()
def compute_error(x: Tensor, y: Tensor) -> Tensor:
    """Return the SQNR in dB of `y` as an approximation of `x`, both of any shape; 0-dim."""
    norm = torch.linalg.vector_norm
    return 20 * torch.log10(norm(x) / norm(x - y))
