"""amax -> scale: correctly rounded, never infinite, NaN and Inf kept."""

import math

import pytest
import torch

from float8.scales import amax_to_scale
from kernels.float8_codes import expected_scale
from sqnr import same_bits
from support.devices import E4M3, E5M2, on_devices


def many_amaxes() -> torch.Tensor:
    """100k float32 values of every exponent >= -100, random mantissas; tiny ones, and edges."""
    generator = torch.Generator().manual_seed(7)
    exponents = torch.randint(127 - 100, 255, (100_000,), generator=generator)
    mantissas = torch.randint(0, 1 << 23, (100_000,), generator=generator)
    random = ((exponents << 23) | mantissas).to(torch.int32).view(torch.float32)
    edges = torch.tensor([1.0, 448.0, 57344.0, 65504.0, 3.3895e38, 2.0**-100, 0.1, 1 / 3])
    tiny = torch.tensor([0.0, 1e-45, 1.18e-38, 2.0**-101, 9e-31])
    largest = torch.tensor([torch.finfo(torch.float32).max])
    return torch.cat([random, edges, tiny, largest])


@on_devices
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_the_float64_quotient_is_rounded_once(
    device: str, dtype: torch.dtype, power_of_2: bool
) -> None:
    amax = many_amaxes()
    scale = amax_to_scale(amax.to(device), dtype, power_of_2)
    assert same_bits(scale, expected_scale(amax.double(), dtype, power_of_2))
    for number in (scale, 1.0 / scale):  # normal ones
        assert number.isfinite().all()
        assert (number >= torch.finfo(torch.float32).tiny).all()
    negative_nan = torch.tensor(-1, dtype=torch.int32).view(torch.float32).item()
    odd = amax_to_scale(
        torch.tensor([math.nan, negative_nan, math.inf], device=device), dtype, power_of_2
    )
    assert not odd.isfinite().any()
    assert odd[:2].isnan().all()
    for shape in ((), (3, 2), (0,)):
        assert amax_to_scale(torch.ones(shape, device=device), dtype, power_of_2).shape == shape
