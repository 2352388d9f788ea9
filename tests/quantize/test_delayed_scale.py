"""The scale that a cast with delayed scaling takes, and what it records."""

import math

import pytest
import torch

from float8.quantize.history import UNKNOWN_SCALE, DelayedScale
from sqnr import same_bits
from support.devices import E4M3, E5M2, on_devices
from support.scales import delayed_scale, dynamic_scale


def state(scale: float, amax: float, device: str) -> DelayedScale:
    return DelayedScale(torch.tensor(scale, device=device), torch.tensor(amax, device=device))


@on_devices
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("round_to_power_of_2", [False, True])
def test_unknown_scale_is_taken_from_the_data(
    device: str, format: torch.dtype, round_to_power_of_2: bool
) -> None:
    x = torch.randn(8, 8, device=device)
    scale = delayed_scale(x, format, round_to_power_of_2, state(UNKNOWN_SCALE, 0.0, device), True)
    assert same_bits(scale, dynamic_scale(x, format, round_to_power_of_2))


@on_devices
def test_known_scale_is_taken_whatever_the_data(device: str) -> None:
    x = torch.randn(8, 8, device=device) * 1000
    assert delayed_scale(x, E4M3, False, state(0.5, 0.0, device), True).item() == 0.5


@on_devices
@pytest.mark.parametrize("known", [False, True])
def test_amax_is_the_largest_since_the_last_sync(device: str, known: bool) -> None:
    cast = state(0.5 if known else UNKNOWN_SCALE, 0.0, device)
    amaxes = []
    for peak in (1.0, 3.0, 2.0):
        x = torch.zeros(4, 4, device=device)
        x[1, 2] = -peak
        delayed_scale(x, E4M3, False, cast, True)
        amaxes.append(cast.amax.item())
    assert amaxes == [1.0, 3.0, 3.0]


@on_devices
def test_nothing_is_recorded_unless_asked(device: str) -> None:
    cast = state(UNKNOWN_SCALE, 0.25, device)
    delayed_scale(torch.ones(4, 4, device=device), E4M3, False, cast, False)
    assert cast.amax.item() == 0.25
    assert cast.scale.item() == UNKNOWN_SCALE


@on_devices
def test_the_scale_taken_does_not_change_with_a_later_sync(device: str) -> None:
    cast = state(0.5, 0.0, device)
    taken = delayed_scale(torch.ones(4, 4, device=device), E4M3, False, cast, True)
    cast.scale.fill_(7.0)
    assert taken.item() == 0.5


@on_devices
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_amax_is_not_lost_before_the_sync(device: str, bad: float) -> None:
    cast = state(0.5, 0.0, device)
    x = torch.ones(4, 4, device=device)
    x[0, 0] = bad
    delayed_scale(x, E4M3, False, cast, True)
    delayed_scale(torch.ones(4, 4, device=device), E4M3, False, cast, True)
    assert not math.isfinite(cast.amax.item())
