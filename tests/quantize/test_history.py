"""The history -> scale update; `tests/sync` compares it with a simulation in plain Python."""

import math

import pytest
import torch

from float8.quantize.history import UNKNOWN_SCALE, next_history_and_scale
from sqnr import same_bits


def after(
    amaxes: list[float], history_len: int, scale_fn_name: str = "max"
) -> tuple[list[float], list[float]]:
    """The last history of one cast, and for each step the amax that its scale stands for."""
    history, scale = torch.zeros(1, history_len), torch.full((1,), UNKNOWN_SCALE)
    float8_max, scales = torch.tensor([448.0], dtype=torch.float64), []
    how = {"scale_fn_name": scale_fn_name, "round_to_power_of_2": False}
    for amax in amaxes:
        given = torch.tensor([amax]), history, scale
        before = [x.clone() for x in given]
        history, scale = next_history_and_scale(*given, float8_max, **how)
        assert all(map(same_bits, given, before))  # what it is given stays as it was
        assert (history.shape, scale.shape) == (before[1].shape, before[2].shape)
        scales.append(round(scale.item() * 448, 4))
    return history[0].tolist(), scales


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("scale_fn_name", ["max", "most_recent"])
def test_non_finite_amax_is_recorded_as_zero_and_keeps_the_scale(
    scale_fn_name: str, bad: float
) -> None:
    history, scales = after([2.0, 2.0, bad], 4, scale_fn_name)
    assert (history, scales) == ([0.0, 2.0, 2.0, 0.0], [0, 2, 2])


def test_max_forgets_after_history_len_steps_and_most_recent_at_once() -> None:
    amaxes = [7.0, 7.0, 1.0, 1.0, 1.0]
    assert after(amaxes, 3, "max")[1] == [0, 7, 7, 7, 1]
    assert after(amaxes, 3, "most_recent")[1] == [0, 7, 1, 1, 1]


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_scale_is_known_once_amaxes_no_longer_grow_by_much(bad: float) -> None:
    """A sync of nothing, and one of what is not finite, tell nothing."""
    assert after([1.0, bad, 3.0, 9.0, 9.5, bad], 1)[1] == [0, 0, 0, 0, 9.5, 9.5]
