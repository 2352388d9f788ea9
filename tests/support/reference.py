"""The casts of a float8 linear layer, computed again from scratch."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from support.devices import FLOAT8_MAX


def reference_scale(x: Tensor, dtype: torch.dtype, power_of_2: bool = False) -> Tensor:
    """The dynamic scale of `x`: the float64 quotient, rounded once to float32."""
    amax = max(x.detach().double().abs().max().item(), 2.0**-100)
    scale = torch.tensor(amax / FLOAT8_MAX[dtype], dtype=torch.float64).float()
    if power_of_2:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    return scale


def reference_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x * (1 / scale)` in float32, saturated, rounded to nearest even; on the CPU."""
    inverse = 1.0 / scale.cpu().float()
    limit = FLOAT8_MAX[dtype]
    return (x.detach().cpu().float() * inverse).clamp(-limit, limit).to(dtype)


def zero_padded(data: Tensor, rows: int, columns: int) -> Tensor:
    """float8 data with rows and columns of zeros appended."""
    missing = (0, columns - data.shape[1], 0, rows - data.shape[0])
    return pad(data.contiguous().view(torch.uint8), missing).view(data.dtype)


def up16(n: int) -> int:
    return (n + 15) // 16 * 16
