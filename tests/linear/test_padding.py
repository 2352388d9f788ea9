"""Dims that are not divisible by 16: GEMMs read, bit for bit, what padding by hand gives them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import tolerances
from float8 import Float8Linear, sync_float8_amax_and_scale_history
from sqnr import same_bits, sqnr
from support.configs import MIXES, delayed, mixed, tensorwise
from support.devices import DTYPES, on_devices
from support.models import forward_backward, seeded
from support.reference import up16
from support.spies import GemmSpy

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


def assert_zero_padded(data: Tensor, wanted: Tensor) -> None:
    """`wanted` [R, C], padded by hand, is `data` within zeros; C is padded in both."""
    assert data.shape[1] == wanted.shape[1]
    assert same_bits(data, wanted[: data.shape[0]])
    assert wanted[data.shape[0] :].float().count_nonzero() == 0


@on_devices
@ODD
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES[::7])  # all dynamic, all delayed
def test_odd_dims_equal_zero_padding_by_hand(
    device: str, mix, dtype: torch.dtype, M: int, K: int, N: int
) -> None:
    """What the GEMMs read has the bits of padding by hand, and so has what is made of a product.

    Not the product itself: torch may add up another number of rows in another order.
    """
    linear = nn.Linear(K, N, device=device, dtype=dtype)
    bigger = padded_by_hand(linear)
    layer = Float8Linear.from_float(linear, mixed(*mix))
    bigger_layer = Float8Linear.from_float(bigger, mixed(*mix, pad_inner_dim=False))
    close = tolerances.HIGH_PRECISION if dtype == torch.float32 else tolerances.GEMM
    for step in range(3):
        x = seeded(step, M, K, dtype=dtype, device=device)
        g = seeded(step + 5, M, N, dtype=dtype, device=device)
        with GemmSpy() as spy:
            got = forward_backward(layer, x, g)
        with GemmSpy() as bigger_spy:
            wanted = forward_backward(
                bigger_layer,
                pad(x, (0, up16(K) - K, 0, up16(M) - M)),
                pad(g, (0, up16(N) - N, 0, up16(M) - M)),
            )
        assert len(spy.gemms) == len(bigger_spy.gemms) == 3
        for mine, theirs in zip(spy.gemms, bigger_spy.gemms, strict=True):
            for i, data in enumerate(mine):
                if data.dim() == 0:
                    assert same_bits(data, theirs[i])
                else:
                    assert_zero_padded(data, theirs[i])
        shapes = {"output": (M, N), "input": (M, K), "weight": (N, K)}
        products = [
            torch._scaled_mm(
                a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=name == "output"
            )[: shapes[name][0], : shapes[name][1]]
            for name, (a, scale_a, b, scale_b) in zip(shapes, spy.gemms, strict=True)
        ]
        products[0] = products[0] + layer.bias.detach()
        for (name, (rows, columns)), product in zip(shapes.items(), products, strict=True):
            assert same_bits(got[name], product), name
            assert sqnr(wanted[name][:rows, :columns], got[name]) > close, name
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
