"""MXFP8 as torchao has it: bytes, exponents, their order, and the three products of a layer."""

import pytest
import torch
from torch import Tensor

from float8 import CastConfig, ScalingGranularity, linear
from float8.formats import E4M3
from float8.kernels.swizzle import swizzled
from float8.quantize import Cast, quantize
from sqnr import sqnr
from support.configs import of_recipe
from support.lazily import Lazily

mx = Lazily("torchao.prototype.mx_formats.mx_tensor")
config = Lazily("torchao.prototype.mx_formats.config")
theirs = Lazily("torchao.prototype.moe_training.mxfp8_linear")
quantization = Lazily("torchao.quantization.quantize_.common.kernel_preference")
utils = Lazily("torchao.prototype.mx_formats.utils")

CAST = Cast(CastConfig(scaling_granularity=ScalingGranularity.BLOCK_1x32))


def wild() -> list[Tensor]:
    """All bfloat16 numbers; blocks of all sizes; zeros, NaN and Inf among others."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    sizes = torch.exp2(torch.randint(-149, 120, (256, 1)).float())
    holes = torch.randn(96, 160)
    holes[:40], holes[:, :40], holes[50, 60], holes[70, 80] = 0, -0.0, torch.nan, -torch.inf
    holes[90, 100] = 3e38
    return [every.view(256, 256).float(), torch.randn(256, 512) * sizes, holes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_bytes_and_exponents(dtype: torch.dtype) -> None:
    for x in wild():
        x = x.to(dtype)
        made = quantize(x, CAST, row=True, col=True)
        for y, ours in ((x, made.row), (x.t().contiguous(), made.col)):
            y = y.float() if dtype == torch.float16 else y  # which they do not take
            exponents, data = mx.to_mx(y, E4M3, 32, config.ScaleCalculationMode.RCEIL)
            assert torch.equal(ours.data.view(torch.uint8), data.view(torch.uint8))
            of_ours = ours.scale.contiguous().view(torch.int32) >> 23
            assert torch.equal(of_ours, exponents.view(torch.uint8).view(of_ours.shape).int())


@pytest.mark.parametrize("shape", [(128, 4), (200, 6), (1, 1)], ids=str)
def test_the_order_of_exponents(shape: tuple[int, int]) -> None:
    exponents = torch.randint(0, 255, shape, dtype=torch.int32)
    ours = swizzled((exponents << 23).view(torch.float32)).view(torch.uint8).flatten()
    assert torch.equal(ours, utils.to_blocked(exponents.to(torch.uint8)))


def test_three_products() -> None:
    """In float32, where both emulate: gradients bit by bit; sums of the output in another order."""
    x, w, g = torch.randn(64, 96), torch.randn(128, 96), torch.randn(64, 128)
    emulated = quantization.KernelPreference.EMULATED
    by_torch = config.MXFP8Dim0CastKernelChoice.TORCH, config.MXFP8Dim1CastKernelChoice.TORCH
    scales = config.ScaleCalculationMode.RCEIL
    how = E4M3, E4M3, E4M3, 32, emulated, *by_torch, scales, False
    made = []
    for call in (
        lambda a, b: linear(a, b, config=of_recipe("mxfp8")),
        lambda a, b: theirs.mx_mm.apply(a, b, *how),
    ):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = call(a, b)
        made.append([y, *torch.autograd.grad(y, (a, b), g)])
    ours, their = made
    assert sqnr(their[0], ours[0]) > 140
    assert torch.equal(ours[1], their[1])
    assert torch.equal(ours[2], their[2])
