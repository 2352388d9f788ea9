"""Non-finite in, non-finite out: a NaN or Inf is never clamped away."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from float8 import Float8Linear, sync_float8_amax_and_scale_history
from support.configs import DELAYED, DYNAMIC, mixed
from support.devices import DTYPES, on_devices
from support.models import forward_backward, seeded

M, K, N = 16, 32, 48
MIX = pytest.mark.parametrize("mix", [(DYNAMIC,) * 3, (DELAYED,) * 3], ids=["dynamic", "delayed"])


def everything_depending_on(operand: str, at: tuple[int, int], results: dict[str, Tensor]):
    """The slices of output, grad_input and grad_weight that contract over the bad element."""
    row, column = at
    if operand == "input":
        return [results["output"][row], results["weight"][:, column]]
    if operand == "weight":
        return [results["output"][:, row], results["input"][:, column]]
    return [results["input"][row], results["weight"][column]]


@on_devices
@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("dtype", DTYPES)
@MIX
def test_non_finite_operand_shows_in_all_that_depends_on_it(
    device: str, mix, dtype: torch.dtype, operand: str
) -> None:
    cases = itertools.product(
        (math.nan, math.inf, -math.inf), ("first step", "after a sync"), (False, True)
    )
    for value, when, power_of_2 in cases:
        config = mixed(*mix, round_scales_to_power_of_2=power_of_2)
        layer = Float8Linear(K, N, bias=False, device=device, dtype=dtype, config=config)
        x = seeded(0, M, K, dtype=dtype, device=device)
        g = seeded(1, M, N, dtype=dtype, device=device)
        if when == "after a sync":
            clean = forward_backward(layer, x, g)
            assert all(bool(result.isfinite().all()) for result in clean.values())
            sync_float8_amax_and_scale_history(layer)
        bad = {"input": x, "weight": layer.weight.data, "grad_output": g}[operand]
        at = (3, 5)
        bad[at] = value
        results = forward_backward(layer, x, g)
        for part in everything_depending_on(operand, at, results):
            assert not bool(part.isfinite().any()), (value, when, power_of_2)


@on_devices
@MIX
def test_one_overflowing_step_leaves_the_next_one_clean(device: str, mix) -> None:
    """And values beyond a delayed scale saturate."""
    x, g = seeded(0, M, K, device=device), seeded(1, M, N, device=device)
    for value in (math.nan, math.inf, 1000):
        layer = Float8Linear(K, N, bias=False, device=device, config=mixed(*mix))
        bad = x.clone()
        bad[0, 0] = value
        for batch in (x, x, bad, x):
            results = forward_backward(layer, batch, g)
            sync_float8_amax_and_scale_history(layer)
            finite = batch is x or value == 1000
            assert all(bool(result.isfinite().all()) for result in results.values()) == finite
