"""The history -> scale update of many casts at once, against a plain Python simulation."""

import math

import numpy as np
import pytest
import torch

from float8.quantize.history import UNKNOWN_SCALE, next_history_and_scale
from support.devices import on_devices
from support.simulation import SimulatedHistory

MAXIMA = [448.0, 57344.0, 448.0]


@on_devices
@pytest.mark.parametrize("round_to_power_of_2", [False, True])
@pytest.mark.parametrize("history_len", [1, 2, 16])
@pytest.mark.parametrize("scale_fn_name", ["max", "most_recent"])
def test_forty_steps_agree_with_the_simulation(
    device: str, scale_fn_name: str, history_len: int, round_to_power_of_2: bool
) -> None:
    rng = np.random.default_rng(3)
    steps = np.exp(rng.normal(size=(40, 3)) * 2).astype(np.float32)
    steps[4] = 0.0, math.inf, math.nan
    steps[5] = 0.0, math.nan, 0.0
    steps[11] = 1e-38, 1e30, -math.inf
    steps[12] = 0.0, 0.0, 0.0
    simulated = [
        SimulatedHistory(history_len, scale_fn_name, peak, round_to_power_of_2) for peak in MAXIMA
    ]
    history = torch.zeros(3, history_len, device=device)
    scale = torch.full((3,), UNKNOWN_SCALE, device=device)
    float8_max = torch.tensor(MAXIMA, dtype=torch.float64, device=device)
    scales_seen = set()
    for step in steps:
        amax = torch.from_numpy(step).to(device)
        history, scale = next_history_and_scale(
            amax,
            history,
            scale,
            float8_max,
            scale_fn_name=scale_fn_name,
            round_to_power_of_2=round_to_power_of_2,
        )
        for simulation, a in zip(simulated, step.tolist(), strict=True):
            simulation.step(a)
        assert history.tolist() == [simulation.history for simulation in simulated]
        assert scale.tolist() == [simulation.scale or UNKNOWN_SCALE for simulation in simulated]
        scales_seen.add(scale[0].item())
    assert len(scales_seen) > 2  # the steps did move the scale


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("scale_fn_name", ["max", "most_recent"])
def test_non_finite_amax_is_recorded_as_zero_and_keeps_the_scale(
    scale_fn_name: str, bad: float
) -> None:
    history, scale = torch.zeros(1, 4), torch.full((1,), UNKNOWN_SCALE)
    float8_max = torch.tensor([448.0], dtype=torch.float64)
    for amax in (2.0, 2.0, bad):
        history, scale = next_history_and_scale(
            torch.tensor([amax]),
            history,
            scale,
            float8_max,
            scale_fn_name=scale_fn_name,
            round_to_power_of_2=False,
        )
    assert history.tolist() == [[0.0, 2.0, 2.0, 0.0]]
    assert scale.tolist() == torch.tensor([2.0 / 448.0]).tolist()


def test_max_forgets_after_history_len_steps_and_most_recent_at_once() -> None:
    last = {}
    for scale_fn_name in ("max", "most_recent"):
        history, scale = torch.zeros(1, 3), torch.zeros(1)
        scales = []
        for amax in (7.0, 7.0, 1.0, 1.0, 1.0):
            history, scale = next_history_and_scale(
                torch.tensor([amax]),
                history,
                scale,
                torch.tensor([448.0], dtype=torch.float64),
                scale_fn_name=scale_fn_name,
                round_to_power_of_2=False,
            )
            scales.append(round(scale.item() * 448))
        last[scale_fn_name] = scales
    assert last == {"max": [0, 7, 7, 7, 1], "most_recent": [0, 7, 1, 1, 1]}


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_scale_is_known_once_amaxes_no_longer_grow_by_much(bad: float) -> None:
    """A sync of nothing, and one of what is not finite, tell nothing."""
    history, scale, known = torch.zeros(1, 1), torch.zeros(1), []
    for amax in (1.0, bad, 3.0, 9.0, 9.5, bad):
        history, scale = next_history_and_scale(
            torch.tensor([amax]),
            history,
            scale,
            torch.tensor([448.0], dtype=torch.float64),
            scale_fn_name="max",
            round_to_power_of_2=False,
        )
        known.append(round(scale.item() * 448, 4))
    assert known == [0, 0, 0, 0, 9.5, 9.5]


def test_what_it_is_given_stays_as_it_was() -> None:
    history, scale = torch.zeros(2, 4), torch.zeros(2)
    next_history_and_scale(
        torch.tensor([1.0, 448.0]),
        history,
        scale,
        torch.tensor([448.0, 448.0], dtype=torch.float64),
        scale_fn_name="max",
        round_to_power_of_2=False,
    )
    assert not history.any()
    assert not scale.any()
