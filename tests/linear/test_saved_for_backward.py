"""What a layer keeps from forward to backward, also under `torch.utils.checkpoint`."""

import copy

import pytest
import torch
from torch import Tensor

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from sqnr import assert_same_bits
from support.configs import DISABLED, RECIPES, of_recipe, tensorwise
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import FeedForward, forward_backward, fp8_state, seeded
from support.spies import OpCounter, saved_tensors
from support.training import Wrapped

M, K, N = 64, 32, 48


def kept(layer: Float8Linear, x: Tensor) -> tuple[list[Tensor], bool]:
    """What a forward keeps besides the weight, and whether it keeps that."""
    with saved_tensors() as saved:
        layer(x)
    rest = [s for s in saved if s.data_ptr() != layer.weight.data_ptr()]
    return rest, len(rest) < len(saved)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_data_are_float8_and_two_scales(device: str, recipe: str, dtype) -> None:
    layer = Float8Linear(K, N, device=device, dtype=dtype, config=of_recipe(recipe))
    x = seeded(0, M, K, dtype=dtype, device=device)
    rest, weight_too = kept(layer, x.requires_grad_())
    assert weight_too
    assert sorted((s.dtype, s.numel()) for s in rest if s.numel() == 1) == [(torch.float32, 1)] * 2
    assert [(s.dtype, s.numel()) for s in rest if s.numel() > 1] == [(E4M3, M * K)]
    rest, weight_too = kept(layer, x.detach())  # no grad_input
    assert not weight_too
    assert [(s.dtype, s.numel()) for s in rest if s.numel() > 1] == [(E4M3, M * K)]
    layer.weight.requires_grad_(False)
    rest, _ = kept(layer, x)
    assert all(s.numel() == 1 for s in rest)


@on_devices
def test_the_saved_input_is_that_of_its_second_use(device: str) -> None:
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=CastConfig(target_dtype=E5M2),
        cast_config_grad_output=CastConfig(target_dtype=E4M3),
    )
    x = seeded(0, M, K, device=device).requires_grad_()
    rest, _ = kept(Float8Linear(K, N, device=device, config=config), x)
    assert [s.dtype for s in rest if s.numel() > 1] == [E5M2]
    high_precision = tensorwise(
        cast_config_input_for_grad_weight=DISABLED, cast_config_grad_output_for_grad_weight=DISABLED
    )
    for config in (high_precision, of_recipe("rowwise_with_gw_hp")):
        rest, _ = kept(Float8Linear(K, N, device=device, config=config), x)
        assert x.data_ptr() in [s.data_ptr() for s in rest]
    for recipe in ("rowwise", "blockwise"):
        rest, _ = kept(Float8Linear(K, N, device=device, config=of_recipe(recipe)), x)
        assert x.data_ptr() not in [s.data_ptr() for s in rest]


@on_devices
@pytest.mark.parametrize(
    ("recipe", "kind", "gemms"),
    [
        ("tensorwise", "checkpoint", 12),
        ("rowwise", "checkpoint", 12),
        ("delayed", "checkpoint", 12),
        ("delayed", "reentrant", 12),
        ("delayed", "selective-checkpoint", 9),
    ],
)
def test_results_and_state_equal_those_without(
    device: str, recipe: str, kind: str, gemms: int
) -> None:
    """9 GEMMs without checkpointing, 3 more to recompute the forward."""
    is_emulated = device == "cpu" and recipe == "rowwise"
    model = convert_to_float8_training(FeedForward(32, 64).to(device), config=of_recipe(recipe))
    checkpointed = Wrapped(copy.deepcopy(model), kind)
    for step in range(3):
        for microbatch in range(2):
            seed = 10 * step + microbatch
            x, g = (seeded(seed + i, 8, 32, device=device) for i in (0, 5))
            wanted = forward_backward(model, x, g)
            with OpCounter() as counter:
                got = forward_backward(checkpointed, x, g)
            assert counter.gemms == (0 if is_emulated else gemms)
            assert_same_bits({n.removeprefix("inner."): x for n, x in got.items()}, wanted)
        for name, buffer in fp8_state(model).items():
            assert torch.equal(fp8_state(checkpointed.inner)[name], buffer), name
        sync_float8_amax_and_scale_history(model)
        sync_float8_amax_and_scale_history(checkpointed)
