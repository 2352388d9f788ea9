"""Training with weights held in float8 has the bits of casting on the fly; each is cast once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    CastConfig,
    Float8LinearConfig,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    update_float8_weights,
)
from sqnr import assert_same_bits
from support.configs import RECIPES, delayed, of_recipe, tensorwise
from support.devices import E4M3, E5M2, on_devices
from support.microbatches import (
    HELD,
    ON_THE_FLY,
    SHAPE,
    accumulate,
    assert_held_equals_on_the_fly,
    training_forward_casts,
    weight_casts,
    with_weights,
)
from support.models import FeedForward, gradients, seeded
from support.modes import MODES, running
from support.training import Wrapped


def convert(model: nn.Module, config: Float8LinearConfig) -> nn.Module:
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


class Holder(nn.Module):
    """One layer of odd shape after something that needs a gradient.

    Its rows are of very different size, so that scales of rows are not those of columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(33, 41)
        self.linear.weight.data *= torch.logspace(-2, 2, 41).unsqueeze(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.silu(x))


class Tied(nn.Module):
    """Two layers, one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())


@on_devices
@pytest.mark.parametrize("recipe", [*RECIPES, "rowwise", "blockwise"])
def test_one_layer_of_odd_shape(device: str, recipe: str) -> None:
    assert_held_equals_on_the_fly(convert(Holder().to(device), of_recipe(recipe)), (17, 33))


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["bfloat16", "autocast"])
def test_feed_forwards_in_bfloat16(device: str, recipe: str, autocast) -> None:
    model = FeedForward(32, 48).to(torch.bfloat16 if autocast is None else torch.float32)
    model = convert(model, of_recipe(recipe)).to(device)
    assert_held_equals_on_the_fly(model, (2, 16, 32), autocast=autocast)


@pytest.mark.parametrize(
    "config",
    [
        of_recipe("delayed", round_scales_to_power_of_2=True, enable_amax_init=False),
        tensorwise(emulate=True),
        Float8LinearConfig(
            cast_config_weight=CastConfig(target_dtype=E5M2),
            cast_config_grad_output=CastConfig(target_dtype=E4M3),
        ),
        delayed(),  # of the weight, too
    ],
    ids=["delayed-from-one-power-of-2", "emulate", "e5m2", "all-delayed"],
)
def test_switches(config) -> None:
    assert_held_equals_on_the_fly(convert(FeedForward(32, 48), config), SHAPE)


def plain(config: Float8LinearConfig) -> nn.Module:
    return convert(FeedForward(32, 48), config)


def frozen(config: Float8LinearConfig) -> nn.Module:
    model = plain(config)
    model.w1.weight.requires_grad_(False)
    return model


BUILD = {
    "tied": lambda config: convert(Tied(), config),
    "frozen": frozen,
    "checkpoint": lambda config: Wrapped(plain(config), "checkpoint"),
    "selective": lambda config: Wrapped(plain(config), "selective-checkpoint"),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("what", BUILD)
def test_tied_frozen_and_checkpointed(recipe: str, what: str) -> None:
    assert_held_equals_on_the_fly(BUILD[what](of_recipe(recipe)), SHAPE)


AUTOCAST = {"autocast": torch.bfloat16, "steps": 2}


@pytest.mark.parametrize(
    ("build", "recipe", "shape", "more"),
    [
        (plain, "delayed", (2, 16, 32), AUTOCAST),
        pytest.param(plain, "tensorwise", (2, 16, 32), AUTOCAST, marks=pytest.mark.exhaustive),
        pytest.param(BUILD["checkpoint"], "delayed", SHAPE, {}, marks=pytest.mark.exhaustive),
        (lambda config: convert(Holder(), config), "blockwise", (17, 33), {}),
    ],
    ids=["delayed", "tensorwise", "checkpoint", "odd"],
)
def test_compiled(build, recipe: str, shape: tuple[int, ...], more: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = build(of_recipe(recipe))
    assert_held_equals_on_the_fly(model, shape, compile=MODES["aot_eager"], **more)


@pytest.mark.parametrize(
    ("recipe", "mode"), [("tensorwise", "eager"), ("blockwise", "eager"), ("delayed", "aot_eager")]
)
def test_each_weight_is_cast_once_per_step(recipe: str, mode: str) -> None:
    """When it begins, in eager mode at the first use, and after each step."""
    model = plain(with_weights(of_recipe(recipe)))
    call = running(model, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    assert weight_casts(model, lambda: attach_to_optimizer(model, optimizer)) == 3
    accumulate(model, call, 0, SHAPE)
    for step in range(1, 3):
        assert weight_casts(model, optimizer.step) == 3
        assert weight_casts(model, lambda n=step: accumulate(model, call, n, SHAPE)) == 0
    update_float8_weights(tied := convert(Tied(), with_weights(of_recipe(recipe))))
    assert weight_casts(tied, lambda: update_float8_weights(tied)) == 1
    assert training_forward_casts(tied) == 0


def test_a_step_without_a_sync_is_noticed_as_ever() -> None:
    model = plain(with_weights(of_recipe("delayed")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update_float8_weights(model)
    accumulate(model, model, 0, SHAPE)
    optimizer.step()
    update_float8_weights(model)
    with pytest.raises(RuntimeError, match="sync_float8_amax_and_scale_history"):
        model(seeded(0, *SHAPE))


def test_compiled_code_that_is_handed_copies_casts_for_itself() -> None:
    grads = []
    for weights, mode in ((ON_THE_FLY, "eager"), (HELD, "aot_eager")):
        torch.manual_seed(0)
        model = Wrapped(plain(with_weights(None, weights)), "checkpoint")
        update_float8_weights(model)
        call = running(model, mode)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
            y = call(seeded(0, *SHAPE))
        y.square().sum().backward()
        grads.append(gradients(model))
    assert_same_bits(*grads)
