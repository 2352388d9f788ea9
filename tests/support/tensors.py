"""Float8 tensors to do things to."""

import torch

from float8 import Float8Tensor
from support.devices import E4M3
from support.models import seeded


def float8(seed: int, *shape: int, device: str = "cpu", dtype=torch.float32, format=E4M3):
    return Float8Tensor.from_high_precision(
        seeded(seed, *shape, device=device, dtype=dtype), format
    )
