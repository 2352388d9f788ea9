"""The scale that a cast takes: from the tensor's own amax, or from what was recorded before."""

import math

import pytest
import torch

from float8 import kernels
from float8.quantize.history import UNKNOWN_SCALE, DelayedScale
from float8.quantize.scale import SMALLEST_AMAX
from float8.quantize.spec import CastSpec
from sqnr import same_bits
from support.devices import DTYPES, E4M3, E5M2, FLOAT8_MAX, on_devices
from support.scales import delayed_scale, dynamic_scale

formats = pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def of_float64(x: torch.Tensor, format: torch.dtype) -> torch.Tensor:
    amax = x.double().abs().max().item()
    return torch.tensor(amax / FLOAT8_MAX[format], dtype=torch.float64).float()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@formats
def test_dynamic_scale_equals_a_float64_recomputation(
    device: str, dtype: torch.dtype, format: torch.dtype
) -> None:
    for shape in ((1, 1), (7, 33), (5, 3, 17)):
        x = torch.randn(shape).mul(3).to(dtype)
        assert same_bits(dynamic_scale(x.to(device), format, False), of_float64(x, format))
    base = torch.randn(40, 48, device=device)
    base[3, 5] = -99.0
    for x in (base.t(), base[1:9, 2:7], base.unfold(0, 2, 3), base[:, ::3].t(), base[3, 5]):
        assert same_bits(dynamic_scale(x, format, False), of_float64(x, format))


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("round_to_power_of_2", [False, True])
def test_smallest_subnormal_survives_the_cast(
    device: str, dtype: torch.dtype, round_to_power_of_2: bool
) -> None:
    # float32's own smallest numbers lie under SMALLEST_AMAX and become 0; the others must not.
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # smallest subnormal
    x = torch.full((16, 16), max(tiny, SMALLEST_AMAX), dtype=dtype, device=device)
    scale = dynamic_scale(x, E4M3, round_to_power_of_2)
    assert math.isfinite(scale.item())
    assert math.isfinite((1.0 / scale).item())
    made = kernels.cast(x, CastSpec(E4M3), scale=scale, row=True, col=False)
    assert made.row is not None
    assert made.scale is scale
    back = made.row.double() * scale.double()
    assert bool((back - x.double()).abs().le(x.double() / 16).all())


@on_devices
@pytest.mark.parametrize("round_to_power_of_2", [False, True])
def test_dynamic_scale_of_odd_tensors(device: str, round_to_power_of_2: bool) -> None:
    x = torch.randn(8, 8, device=device, requires_grad=True)
    assert not dynamic_scale(x, E4M3, round_to_power_of_2).requires_grad
    for bad in (math.nan, math.inf, -math.inf):
        y = x.detach().clone()
        y[2, 3] = bad
        assert not math.isfinite(dynamic_scale(y, E4M3, round_to_power_of_2).item())
    zeros = torch.zeros_like(x)
    smallest = torch.tensor(SMALLEST_AMAX, device=device)
    scale = dynamic_scale(zeros, E4M3, round_to_power_of_2)
    assert same_bits(scale, dynamic_scale(smallest, E4M3, round_to_power_of_2))
    made = kernels.cast(zeros, CastSpec(E4M3), scale=scale, row=True, col=False)
    assert made.row is not None
    assert made.row.float().abs().max() == 0


def state(scale: float, amax: float, device: str) -> DelayedScale:
    return DelayedScale(torch.tensor(scale, device=device), torch.tensor(amax, device=device))


@on_devices
@formats
@pytest.mark.parametrize("round_to_power_of_2", [False, True])
def test_unknown_scale_is_taken_from_the_data(
    device: str, format: torch.dtype, round_to_power_of_2: bool
) -> None:
    x = torch.randn(8, 8, device=device)
    scale = delayed_scale(x, format, round_to_power_of_2, state(UNKNOWN_SCALE, 0.0, device), True)
    assert same_bits(scale, dynamic_scale(x, format, round_to_power_of_2))


@on_devices
def test_known_scale_is_taken_whatever_the_data(device: str) -> None:
    cast, x = state(0.5, 0.0, device), torch.randn(8, 8, device=device) * 1000
    taken = delayed_scale(x, E4M3, False, cast, True)
    cast.scale.fill_(7.0)  # a later sync does not change what was taken
    assert taken.item() == 0.5


@on_devices
@pytest.mark.parametrize("scale", [0.5, UNKNOWN_SCALE])
def test_amax_is_the_largest_since_the_last_sync(device: str, scale: float) -> None:
    cast, amaxes = state(scale, 0.25, device), []
    for peak, record in ((9.0, False), (1.0, True), (3.0, True), (2.0, True)):
        x = torch.zeros(4, 4, device=device)
        x[1, 2] = -peak
        delayed_scale(x, E4M3, False, cast, record)
        amaxes.append(cast.amax.item())
    assert amaxes == [0.25, 1.0, 3.0, 3.0]  # nothing is recorded unless asked
    assert cast.scale.item() == scale


@on_devices
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_amax_is_not_lost_before_the_sync(device: str, bad: float) -> None:
    cast, x = state(0.5, 0.0, device), torch.ones(4, 4, device=device)
    x[0, 0] = bad
    delayed_scale(x, E4M3, False, cast, True)
    delayed_scale(torch.ones(4, 4, device=device), E4M3, False, cast, True)
    assert not math.isfinite(cast.amax.item())
