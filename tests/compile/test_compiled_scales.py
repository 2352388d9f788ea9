"""Scales computed in compiled code: the bits of eager mode."""

import pytest
import torch

from float8.quantize.history import UNKNOWN_SCALE, DelayedScale, next_history_and_scale
from float8.quantize.scale import amax_to_scale
from sqnr import same_bits
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded
from support.scales import delayed_scale, dynamic_scale


def all_scales(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        dynamic_scale(x, format, to_power_of_2)
        for x in inputs
        for format in (E4M3, E5M2)
        for to_power_of_2 in (False, True)
    ]


@on_devices
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dynamic_scales(device: str, backend: str) -> None:
    compiled = torch.compile(all_scales, backend=backend, fullgraph=True)
    for seed, factor in enumerate((1.0, 1e-3, 300.0)):
        inputs = [seeded(seed, 65, 33, device=device).mul(factor).to(dtype) for dtype in DTYPES]
        for wanted, got in zip(all_scales(inputs), compiled(inputs), strict=True):
            assert same_bits(got, wanted)


@on_devices
def test_special_amaxes_under_inductor(device: str) -> None:
    def scales(amax: torch.Tensor) -> list[torch.Tensor]:
        return [amax_to_scale(amax, f, p) for f in (E4M3, E5M2) for p in (False, True)]

    special = [0.0, 1e-45, 2.0**-101, 2.0**-100, 1 / 3, 448.0, 57344.0, 3.4e38]
    amax = torch.tensor([*special, torch.inf, torch.nan], device=device)
    random = torch.exp(20 * seeded(0, 10_000, device=device)).clamp(max=3e38)
    amax = torch.cat([amax, random])
    for wanted, got in zip(scales(amax), torch.compile(scales, fullgraph=True)(amax), strict=True):
        assert same_bits(got.nan_to_num(-1.0), wanted.nan_to_num(-1.0))


@on_devices
def test_delayed_scales_and_amaxes_under_inductor(device: str) -> None:
    def step(x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        return delayed_scale(x, E4M3, True, DelayedScale(scale, amax), True)

    compiled = torch.compile(step, fullgraph=True)
    for scale in (UNKNOWN_SCALE, 0.37):
        states = [torch.tensor([scale, 0.5], device=device).unbind() for _ in range(2)]
        for seed in range(3):
            x = seeded(seed, 33, 17, device=device)
            wanted, got = step(x, *states[0]), compiled(x, *states[1])
            assert same_bits(got, wanted)
            assert all(same_bits(*pair) for pair in zip(*states, strict=True))


@on_devices
@pytest.mark.parametrize("scale_fn_name", ["max", "most_recent"])
def test_history_update_can_be_compiled(device: str, scale_fn_name: str) -> None:
    def update(amax, history, scale, float8_max):
        return next_history_and_scale(
            amax,
            history,
            scale,
            float8_max,
            scale_fn_name=scale_fn_name,
            round_to_power_of_2=False,
        )

    compiled = torch.compile(update, backend="aot_eager", fullgraph=True)
    float8_max = torch.tensor([448.0, 57344.0], dtype=torch.float64, device=device)
    states = [(torch.zeros(2, 3, device=device), torch.zeros(2, device=device)) for _ in range(2)]
    for seed in range(5):
        amax = seeded(seed, 2, device=device).abs()
        states = [
            update(amax, *states[0], float8_max),
            compiled(amax, *states[1], float8_max),
        ]
        assert all(same_bits(*pair) for pair in zip(*states, strict=True))
