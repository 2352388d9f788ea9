"""amax -> scale: correctly rounded, never infinite, NaN and Inf kept."""

import math

import pytest
import torch

from float8.scales import SMALLEST_AMAX, amax_to_scale
from sqnr import same_bits
from support.devices import E4M3, E5M2, FLOAT8_MAX, on_devices

FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def many_amaxes() -> torch.Tensor:
    """100k positive float32 values of every exponent >= -100, random mantissas, and edges."""
    generator = torch.Generator().manual_seed(7)
    exponents = torch.randint(127 - 100, 255, (100_000,), generator=generator)
    mantissas = torch.randint(0, 1 << 23, (100_000,), generator=generator)
    random = ((exponents << 23) | mantissas).to(torch.int32).view(torch.float32)
    edges = torch.tensor([1.0, 448.0, 57344.0, 65504.0, 3.3895e38, 2.0**-100, 0.1, 1 / 3])
    ordinary = torch.randn(10_000, generator=generator).abs()
    return torch.cat([random, edges, ordinary])


@on_devices
@FORMATS
def test_scale_equals_the_float64_quotient_rounded_once(device: str, dtype: torch.dtype) -> None:
    tiny = torch.tensor([0.0, 1e-45, 1.18e-38, 2.0**-101, 9e-31])
    amax = torch.cat([many_amaxes(), tiny, torch.tensor([torch.finfo(torch.float32).max])])
    by_hand = [max(a, SMALLEST_AMAX) / FLOAT8_MAX[dtype] for a in amax.tolist()]  # float64
    expected = torch.tensor(by_hand, dtype=torch.float64).to(torch.float32)
    scale = amax_to_scale(amax.to(device), dtype, False)
    assert same_bits(scale, expected)
    for number in (scale, 1.0 / scale):  # normal ones
        assert number.isfinite().all()
        assert (number >= torch.finfo(torch.float32).tiny).all()
    negative_nan = torch.tensor(-1, dtype=torch.int32).view(torch.float32).item()
    odd = torch.tensor([math.nan, negative_nan, math.inf], device=device)
    for power_of_2 in (False, True):
        assert amax_to_scale(odd, dtype, power_of_2).isfinite().tolist() == [False] * 3
        assert amax_to_scale(odd, dtype, power_of_2)[:2].isnan().all()
        for shape in ((), (3, 2), (0,)):
            ones = torch.ones(shape, device=device)
            assert amax_to_scale(ones, dtype, power_of_2).shape == shape


@on_devices
@FORMATS
def test_power_of_two_scale_is_the_next_one_up(device: str, dtype: torch.dtype) -> None:
    scale = amax_to_scale(many_amaxes().to(device), dtype, False).cpu()
    rounded = amax_to_scale(many_amaxes().to(device), dtype, True).cpu()
    mantissa, exponent = zip(*(math.frexp(s) for s in scale.tolist()), strict=True)
    assert min(mantissa) == 0.5  # some of them are powers of two already
    up = [e - 1 if m == 0.5 else e for m, e in zip(mantissa, exponent, strict=True)]
    assert same_bits(rounded, torch.tensor([2.0**e for e in up], dtype=torch.float64).float())
    assert bool((rounded >= scale).all())  # never down: nothing saturates
