"""Helpers that are the same as torchao's, under torchao's module name.

Helpers for casts and scales are left out: torchao multiplies by the scale before a cast, this
library after a cast.
"""

import torch
from torch import Tensor

from float8.config import e4m3_dtype as e4m3_dtype
from float8.config import e5m2_dtype as e5m2_dtype

FP8_TYPES = {e4m3_dtype, e5m2_dtype}


@torch.no_grad()
def compute_error(x: Tensor, y: Tensor) -> Tensor:
    """Return the SQNR in dB, 0-dim, of `y` as an approximation of `x` of the same shape."""
    norm = torch.linalg.vector_norm
    return 20 * torch.log10(norm(x) / norm(x - y))
