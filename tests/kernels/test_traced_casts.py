"""Casts in code that a compiler sees: data were divided by the scale that the GEMM multiplies."""

import pytest
import torch
from torch import Tensor

from float8.config import ScalingGranularity, ScalingType
from float8.quantize.quantize import quantize
from float8.quantize.spec import CastSpec, Quantized, dequantised

SIZE = 2048  # rows so long that Inductor takes their amaxes in one kernel and divides in another


def product(x: Tensor, weight: Tensor) -> Tensor:
    """[R, C] bf16; Inductor goes on with the float32 of before the rounding."""
    return (x.float() * weight.float()).to(torch.bfloat16)


def operands(device: str) -> tuple[Tensor, Tensor]:
    """Of a product whose amax is 3.503 in float32 and 3.5 in bf16, in all runs of 64 elements.

    3.5 is 448 / 128: rounded up to a power of two, the scale of the one is twice that of the other.
    """
    x = torch.rand(SIZE, SIZE, device=device).to(torch.bfloat16)
    at = torch.arange(SIZE, device=device)
    x[(at[:, None] + at) % 64 == 0] = 1.0625
    weight = torch.full((SIZE,), 3.296875, device=device, dtype=torch.bfloat16)
    assert product(x, weight).max() == 3.5 < 1.0625 * 3.296875
    return x, weight


def compiled_cast(granularity: ScalingGranularity, x: Tensor, weight: Tensor) -> Quantized:
    spec = CastSpec(torch.float8_e4m3fn, granularity, ScalingType.DYNAMIC, power_of_2=True)

    def cast(x: Tensor, weight: Tensor) -> Quantized:
        return quantize(product(x, weight), spec, row=True, col=True, fuse_amax=True)

    torch._dynamo.reset()
    return torch.compile(cast, fullgraph=True)(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ScalingGranularity)
def test_data_fit_their_scales(granularity: ScalingGranularity) -> None:
    x, weight = operands("cuda")
    made = compiled_cast(granularity, x, weight)
    exact = x.double() * weight.double()
    for part, expected in ((made.row, exact), (made.col, exact.t())):
        assert part is not None
        got = dequantised(part, granularity).double()
        # Rounded to 4 significant bits, maybe of what was rounded to 8 before.
        assert ((got - expected).abs() <= expected * (2**-4 + 2**-8) + 2**-16).all()


def test_amaxes_of_rows_and_columns_are_not_rounded() -> None:
    """Without a GPU: there all kernels would see the same amax, rounded or not."""
    made = compiled_cast(ScalingGranularity.AXISWISE, *operands("cpu"))
    for part in made.row, made.col:
        assert part is not None
        assert (part.scale == 2**-6).all()  # that of 3.503
