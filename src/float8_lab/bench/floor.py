"""The three float8 GEMMs of a layer alone: what casts could at best be hidden behind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from float8.formats import E4M3, E5M2
from float8.gemm import Gemm, matmul
from float8.quantize.spec import Part
from float8_lab.bench.shapes import Shape
from float8_lab.bench.timing import call_sampler, kernel_sampler


def float8_gemms_sampler(shape: Shape, device: torch.device) -> Callable[[], float]:
    """Samples output, grad_input and grad_weight, as the default configuration computes them."""
    M, K, N = shape
    one = torch.ones((), device=device)

    def operand(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16).to(dtype)

    x, weight, grad = operand(M, K, E4M3), operand(N, K, E4M3), operand(M, N, E5M2)
    x_t, weight_t, grad_t = (t.t().contiguous() for t in (x, weight, grad))

    def gemms() -> object:
        return [
            matmul(Part(a, one), Part(b, one), gemm=Gemm(fast), out_dtype=torch.bfloat16)
            for a, b, fast in (
                (x, weight, True),
                (grad, weight_t, False),
                (grad_t, x_t, False),
            )
        ]

    gemms()
    sampler = call_sampler if device.type != "cuda" else kernel_sampler
    return sampler([gemms], device)
