"""Dims that are not divisible by 16: equal, bit for bit, to padding with zeros by hand."""

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from float8 import Float8Linear, sync_float8_amax_and_scale_history
from sqnr import same_bits
from support.configs import MIXES, delayed, mixed, tensorwise
from support.devices import DTYPES, on_devices
from support.models import forward_backward, seeded
from support.reference import up16

ODD = pytest.mark.parametrize(
    ("M", "K", "N"),
    [(1, 1, 1), (17, 16, 16), (16, 17, 16), (16, 16, 17), (31, 100, 7), (3, 15, 47)],
)


def padded_by_hand(linear: nn.Linear) -> nn.Linear:
    N, K = linear.weight.shape
    bigger = nn.Linear(up16(K), up16(N), linear.bias is not None)
    bigger.to(linear.weight.device, linear.weight.dtype)
    with torch.no_grad():
        bigger.weight.copy_(pad(linear.weight, (0, up16(K) - K, 0, up16(N) - N)))
        if linear.bias is not None:
            bigger.bias.copy_(pad(linear.bias, (0, up16(N) - N)))
    return bigger


@on_devices
@ODD
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES[::7])  # all dynamic, all delayed
def test_odd_dims_equal_zero_padding_by_hand(
    device: str, mix, dtype: torch.dtype, M: int, K: int, N: int
) -> None:
    linear = nn.Linear(K, N, device=device, dtype=dtype)
    bigger = padded_by_hand(linear)
    layer = Float8Linear.from_float(linear, mixed(*mix))
    bigger_layer = Float8Linear.from_float(bigger, mixed(*mix, pad_inner_dim=False))
    for step in range(2):
        x = seeded(step, M, K, dtype=dtype, device=device)
        g = seeded(step + 5, M, N, dtype=dtype, device=device)
        got = forward_backward(layer, x, g)
        wanted = forward_backward(
            bigger_layer,
            pad(x, (0, up16(K) - K, 0, up16(M) - M)),
            pad(g, (0, up16(N) - N, 0, up16(M) - M)),
        )
        assert same_bits(got["output"], wanted["output"][:M, :N])
        assert same_bits(got["input"], wanted["input"][:M, :K])
        assert same_bits(got["weight"], wanted["weight"][:N, :K])
        for each in (layer, bigger_layer):
            sync_float8_amax_and_scale_history(each)


@on_devices
@pytest.mark.parametrize(("K", "N"), [(16, 17), (17, 16)])
def test_pad_inner_dim_false_refuses_odd_features(device: str, K: int, N: int) -> None:
    with pytest.raises(
        ValueError, match=r"(?s)got weight of shape .*expected .*pad_inner_dim=True"
    ):
        Float8Linear(K, N, device=device, config=tensorwise(pad_inner_dim=False))


@on_devices
@pytest.mark.parametrize("config", [tensorwise, delayed])
def test_pad_inner_dim_false_refuses_odd_token_counts_in_training(device: str, config) -> None:
    layer = Float8Linear(32, 16, device=device, config=config(pad_inner_dim=False))
    x = torch.randn(3, 5, 32, device=device)
    with pytest.raises(
        ValueError, match=r"got 15 tokens.*expected a multiple of 16.*pad_inner_dim"
    ):
        layer(x)
    with torch.no_grad():  # no grad_weight: nothing is contracted over tokens
        assert layer(x).shape == (3, 5, 16)
    assert layer(torch.randn(4, 4, 32, device=device)).shape == (4, 4, 16)
