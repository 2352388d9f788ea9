"""A converted model against the same one in high precision."""

import copy

import pytest
import torch
from torch import nn

import tolerances
from float8 import convert_to_float8_training, sync_float8_amax_and_scale_history
from sqnr import sqnr
from support.configs import DELAYED, MIXES, mixed
from support.devices import DTYPES, on_devices
from support.models import FeedForward, forward_backward, seeded

SIZES = {"cpu": (128, 512), "cuda": (4096, 16384)}
RANKS = pytest.mark.parametrize("leading", [(), (16,), (2, 2, 8)], ids=["1d", "2d", "4d"])
BIAS = pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])


def step_in_both(model: nn.Module, mix, shape: tuple[int, ...], out_features: int, dtype):
    """One training step in high precision, and in float8 with scales from a step before it."""
    device = next(model.parameters()).device.type
    float8_model = convert_to_float8_training(copy.deepcopy(model), config=mixed(*mix))
    x = seeded(0, *shape, dtype=dtype, device=device)
    g = seeded(1, *shape[:-1], out_features, dtype=dtype, device=device)
    for _ in range(2) if DELAYED in mix else ():
        forward_backward(float8_model, x, g)
        sync_float8_amax_and_scale_history(float8_model)
    wanted = forward_backward(model, x, g)
    got = forward_backward(float8_model, x, g)
    return wanted, got


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@RANKS
@BIAS
@pytest.mark.parametrize("mix", MIXES)
def test_linear(device: str, mix, bias: bool, leading: tuple[int, ...], dtype) -> None:
    K, N = SIZES[device]
    linear = nn.Linear(K, N, bias=bias, device=device, dtype=dtype)
    wanted, got = step_in_both(linear, mix, (*leading, K), N, dtype)
    assert sqnr(wanted["output"], got["output"]) >= tolerances.LINEAR_OUTPUT
    assert sqnr(wanted["weight"], got["weight"]) >= tolerances.LINEAR_GRAD_WEIGHT
    assert sqnr(wanted["input"], got["input"]) >= tolerances.LINEAR_GRAD_INPUT
    if bias:  # a plain sum of grad_output: no float8 in it
        assert torch.equal(wanted["bias"], got["bias"])
    assert got.keys() == wanted.keys()
    assert all(got[name].dtype == wanted[name].dtype == dtype for name in wanted)
    assert not torch.equal(wanted["output"], got["output"])  # float8 did run


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@RANKS
@BIAS
@pytest.mark.parametrize("mix", MIXES)
def test_feed_forward(device: str, mix, bias: bool, leading: tuple[int, ...], dtype) -> None:
    dim, hidden = SIZES[device]
    with torch.device(device):
        model = FeedForward(dim, hidden, bias).to(dtype)
    wanted, got = step_in_both(model, mix, (*leading, dim), dim, dtype)
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert sqnr(wanted[name], got[name]) > tolerances.FFN, name
