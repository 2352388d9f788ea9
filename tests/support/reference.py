"""The casts of a float8 linear layer, computed again from scratch."""

import torch
from torch import Tensor

from support.devices import E4M3, FLOAT8_MAX


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


def reference_values(
    x: Tensor,
    block: tuple[int, int] = (0, 0),
    dtype: torch.dtype = E4M3,
    power_of_2: bool = False,
    source: Tensor | None = None,
) -> Tensor:
    """`x` [R, C] in float64 after a cast with a scale for each block of this size; 0: all.

    One block after the other, each as a tensor of its own. `source`: what scales are chosen for,
    as under delayed scaling.
    """
    x = x.detach().cpu()
    values = torch.empty(x.shape, dtype=torch.float64)
    height, width = (size or full for size, full in zip(block, x.shape, strict=True))
    for r in range(0, x.shape[0], height):
        for c in range(0, x.shape[1], width):
            part = x[r : r + height, c : c + width]
            scale = reference_scale(part if source is None else source, dtype, power_of_2)
            data = reference_cast(part, scale, dtype)
            values[r : r + height, c : c + width] = data.double() * scale.double()
    return values
