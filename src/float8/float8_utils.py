"""Helpers of torchao, without those for casts and scales: torchao's scales are reciprocals."""

import torch
from torch import Tensor

from float8.config import e4m3_dtype as e4m3_dtype
from float8.config import e5m2_dtype as e5m2_dtype

FP8_TYPES = {e4m3_dtype, e5m2_dtype}


@torch.no_grad()
def compute_error(x: Tensor, y: Tensor) -> Tensor:
    """Return the SQNR of `y` as a copy of `x`, in dB, 0-dim: 20 * log10(norm(x) / norm(x - y))."""
    norm = torch.linalg.vector_norm
    return 20 * torch.log10(norm(x) / norm(x - y))
