"""Experts as torchtitan writes them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """Three of them, whose one method multiplies; of their weights the second is read as a copy."""

    def __init__(self, weight: Callable[..., Tensor] = torch.randn) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(weight(3, *size)) for size in ((48, 32), (16, 48)))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        h = self._grouped_mm(A=x, B_t=self.w1.transpose(1, 2), offs=offs).relu()
        return self._grouped_mm(A=h, B_t=self.w2.double().float().transpose(1, 2), offs=offs)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        ends = [0, *offs.tolist()]
        return torch.cat([A[a:b] @ w for a, b, w in zip(ends, ends[1:], B_t, strict=False)])
