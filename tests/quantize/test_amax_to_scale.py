"""amax -> scale: correctly rounded, never infinite, NaN and Inf kept."""

import math

import pytest
import torch

from float8 import Float8Tensor
from float8.scales import SMALLEST_AMAX, amax_to_scale
from sqnr import same_bits
from support.devices import DTYPES, E4M3, E5M2, FLOAT8_MAX, on_devices

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
    amax = many_amaxes()
    by_hand = [max(a, SMALLEST_AMAX) / FLOAT8_MAX[dtype] for a in amax.tolist()]  # float64
    expected = torch.tensor(by_hand, dtype=torch.float64).to(torch.float32)
    assert same_bits(amax_to_scale(amax.to(device), dtype, False), expected)


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


@on_devices
@FORMATS
@pytest.mark.parametrize("round_to_power_of_2", [False, True])
def test_scales_at_the_ends(device: str, dtype: torch.dtype, round_to_power_of_2: bool) -> None:
    """NaN and Inf stay; scales of all else, and their reciprocals, are normal numbers."""
    negative_nan = torch.tensor(-1, dtype=torch.int32).view(torch.float32).item()
    odd = torch.tensor([math.nan, negative_nan, math.inf], device=device)
    scale = amax_to_scale(odd, dtype, round_to_power_of_2)
    assert scale.isnan().tolist() == [True, True, False]
    assert scale[2] == math.inf
    tiny = [0.0, 1e-45, 1.18e-38, 5.96e-08, 6.1e-05, 2.0**-100, 2.0**-101, 9e-31]
    amax = torch.tensor(tiny, device=device)
    scale = amax_to_scale(amax, dtype, round_to_power_of_2)
    assert scale.dtype == torch.float32
    for number in (scale, 1.0 / scale):
        assert (number >= torch.finfo(torch.float32).tiny).all()
        assert number.isfinite().all()
    largest = torch.tensor(torch.finfo(torch.float32).max, device=device)
    scale = amax_to_scale(largest, dtype, round_to_power_of_2)
    assert math.isfinite(scale.item())
    assert (1.0 / scale).item() > 0
    for shape in ((), (1,), (3, 2), (0,)):
        ones = torch.ones(shape, device=device)
        assert amax_to_scale(ones, dtype, round_to_power_of_2).shape == shape


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_the_smallest_numbers_survive_a_cast(
    device: str, dtype: torch.dtype, power_of_2: bool
) -> None:
    """But for those of float32 under SMALLEST_AMAX, which become zeros; zeros stay."""
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # smallest subnormal
    for value in (max(tiny, SMALLEST_AMAX), 0.0):
        x = torch.full((16, 16), value, dtype=dtype, device=device)
        cast = Float8Tensor.from_high_precision(x, round_scales_to_power_of_2=power_of_2)
        back = cast._data.double() * cast._scale.double()
        assert bool((back - x.double()).abs().le(x.double() / 16).all())
