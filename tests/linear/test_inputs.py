"""Every input that `nn.Linear` takes, and one clear error for every other; what is not finite."""

import copy
import itertools
import math
import re

import pytest
import torch
from torch import Tensor

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    linear,
    sync_float8_amax_and_scale_history,
)
from sqnr import assert_same_bits, same_bits
from support.configs import BOTH, DELAYED, DYNAMIC, FINER, mixed, of_recipe
from support.devices import DTYPES, on_devices
from support.errors import require_errors
from support.models import copied, forward_backward, fp8_state, seeded

K, N = 32, 48


@on_devices
@BOTH
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (3, 1, 2)], ids=["1d", "2d", "3d", "4d"])
def test_ranks_give_the_values_of_the_flattened_input(
    device: str, config: Float8LinearConfig, shape: tuple[int, ...]
) -> None:
    """The output is no view: it can be written into, and FSDP2 does not warn of it."""
    layer = Float8Linear(K, N, device=device, config=config)
    x, g = seeded(0, *shape, K, device=device), seeded(1, *shape, N, device=device)
    y = copy.deepcopy(layer)(x.requires_grad_())
    assert not y._is_view()
    y.mul_(2).sum().backward()
    got = forward_backward(layer, x, g)
    flat = forward_backward(layer, x.reshape(-1, K), g.reshape(-1, N))
    assert got["output"].shape == (*shape, N)
    assert got["input"].shape == (*shape, K)
    assert_same_bits({name: x.reshape(flat[name].shape) for name, x in got.items()}, flat)


@on_devices
@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_change_the_values(
    device: str, dtype: torch.dtype, config: Float8LinearConfig
) -> None:
    # The gradient of a bias is torch's own sum, whose order depends on strides.
    layer = Float8Linear(K, N, bias=False, device=device, dtype=dtype, config=config)

    def made(seed: int, *shape: int) -> torch.Tensor:
        return seeded(seed, *shape, dtype=dtype, device=device)

    x, g = made(0, 12, K), made(1, 12, N)
    cases = [
        (made(0, K, 12).t(), g),
        (made(0, 24, 2 * K)[::2, ::2], g),
        (made(0, 1, K).expand(12, K), g),
        (made(0, 3, K, 4).permute(0, 2, 1), g.reshape(3, 4, N)),
        (x, made(1, N, 12).t()),
        (x, made(1, 24, N)[::2]),
        (x, made(1).expand(12, N)),  # what sum().backward() sends
        (x, made(1, 1, N).expand(12, N)),
    ]
    for x, g in cases:
        assert not (x.is_contiguous() and g.is_contiguous())
        got = forward_backward(layer, x, g)
        assert_same_bits(got, forward_backward(layer, x.contiguous(), g.contiguous()))


@on_devices
@BOTH
def test_an_activation_written_between_two_layers_takes_effect(
    device: str, config: Float8LinearConfig
) -> None:
    """Though no version counter tells of it: nothing is remembered of an input."""
    first, second = (Float8Linear(K, N, bias=False, device=device, config=config) for _ in "ab")
    wanted = copy.deepcopy(second)(3 * seeded(0, 16, K, device=device))
    x = seeded(0, 16, K, device=device).requires_grad_() * 1
    first(x)
    x.data.mul_(3)
    assert same_bits(second(x), wanted)


@on_devices
@BOTH
@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3)])
def test_zero_rows(device: str, shape: tuple[int, ...], config: Float8LinearConfig) -> None:
    for dtype in DTYPES:
        layer = Float8Linear(K, N, device=device, dtype=dtype, config=config)
        before = copied(layer)
        x = torch.empty(*shape, K, device=device, dtype=dtype)
        results = forward_backward(layer, x, torch.empty(*shape, N, device=device, dtype=dtype))
        assert results["output"].shape == (*shape, N)
        assert results["output"].dtype == results["input"].dtype == dtype
        assert results["input"].shape == x.shape
        assert results["weight"].shape == (N, K)
        assert results["weight"].abs().max() == 0
        assert results["bias"].abs().max() == 0
        assert all(torch.equal(before[name], x) for name, x in fp8_state(layer).items())
    layer, x = layer.float(), x.float().requires_grad_()
    assert layer(Float8Tensor.from_high_precision(x)).shape == (*shape, N)
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.abs().max() == 0


@on_devices
@BOTH
def test_wrong_shapes_and_dtypes(device: str, config: Float8LinearConfig) -> None:
    layer = Float8Linear(K, N, device=device, config=config)
    x = torch.ones(4, K, device=device)
    for call in (layer, lambda x: linear(x, layer.weight)):
        for shape in ((4, 31), (0, 31), ()):
            expected = re.escape(f"got input of shape {shape}, expected [..., 32]")
            require_errors((f"ValueError: {expected}", call, [torch.ones(shape, device=device)]))
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float64):
            row = (f"TypeError: got input of dtype {dtype}.*expected", call, [x.to(dtype)])
            require_errors(row)
            with torch.autocast(device, torch.bfloat16):
                require_errors(row)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            expected = f"got input of dtype {dtype} and weight of dtype torch.float32"
            require_errors((f"TypeError: {expected}", call, [x.to(dtype)]))
    expected, x = "TypeError: got input of dtype torch.float64, expected one of", x.double()
    layer.double()
    require_errors((expected, layer, [x]), (expected, linear, (x, layer.weight)))


@pytest.mark.gpu
@BOTH
def test_input_on_another_device(config: Float8LinearConfig) -> None:
    layer = Float8Linear(K, N, device="cuda", config=config)
    with pytest.raises((ValueError, RuntimeError), match=r"(?s)cpu.*cuda|cuda.*cpu"):
        layer(torch.randn(4, K))


M = 16
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
@MIX
def test_non_finite_operand_shows_in_all_that_depends_on_it(device: str, mix, operand: str) -> None:
    dtype, bad_values = torch.bfloat16, (math.nan, math.inf, -math.inf)
    for value, synced, power_of_2 in itertools.product(bad_values, (False, True), (False, True)):
        config = mixed(*mix, round_scales_to_power_of_2=power_of_2)
        layer = Float8Linear(K, N, bias=False, device=device, dtype=dtype, config=config)
        x = seeded(0, M, K, dtype=dtype, device=device)
        g = seeded(1, M, N, dtype=dtype, device=device)
        if synced:
            clean = forward_backward(layer, x, g)
            assert all(bool(result.isfinite().all()) for result in clean.values())
            sync_float8_amax_and_scale_history(layer)
        bad = {"input": x, "weight": layer.weight.data, "grad_output": g}[operand]
        at = (3, 5)
        bad[at] = value
        results = forward_backward(layer, x, g)
        for part in everything_depending_on(operand, at, results):
            assert not bool(part.isfinite().any()), (value, synced, power_of_2)


@on_devices
@MIX
def test_one_overflowing_step_leaves_the_next_one_clean(device: str, mix) -> None:
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


@on_devices
@pytest.mark.parametrize("recipe", FINER)
def test_zeros_and_what_is_not_finite_under_finer_scales(recipe: str, device: str) -> None:
    layer = Float8Linear(256, 48, False, device, config=of_recipe(recipe))
    x, g = seeded(0, 160, 256, device=device), seeded(1, 160, 48, device=device)
    x[5] = 0
    x[:, 7] = 0
    got = forward_backward(layer, x, g)
    assert (got["output"][5] == 0).all()
    assert (got["weight"][:, 7] == 0).all()
    assert all(t.isfinite().all() for t in got.values())
    x[9, 11] = torch.inf
    got = forward_backward(layer, x, g)
    assert got["output"][9].isnan().all()
    assert got["output"].isfinite().all(dim=1).sum() == 159  # its own row alone
    # In high precision an Inf stays one.
    assert not got["weight"][:, 11].isfinite().any()
