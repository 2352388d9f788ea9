"""Training with weights held in float8 has the bits of casting on the fly; each is cast once."""

from functools import partial

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
from sqnr import same_bits
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
from support.models import FeedForward, seeded
from support.training import Wrapped

AOT_EAGER = partial(torch.compile, backend="aot_eager", fullgraph=True)
LONGER = pytest.mark.exhaustive


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
        of_recipe("delayed", round_scales_to_power_of_2=True),
        of_recipe("delayed", enable_amax_init=False),
        tensorwise(emulate=True),
        Float8LinearConfig(
            cast_config_weight=CastConfig(target_dtype=E5M2),
            cast_config_grad_output=CastConfig(target_dtype=E4M3),
        ),
        delayed(),  # of the weight, too
    ],
    ids=["delayed-power-of-2", "delayed-from-one", "emulate", "e5m2", "all-delayed"],
)
def test_switches(config) -> None:
    assert_held_equals_on_the_fly(convert(FeedForward(32, 48), config), SHAPE)


def frozen(config: Float8LinearConfig) -> nn.Module:
    model = convert(FeedForward(32, 48), config)
    model.w1.weight.requires_grad_(False)
    return model


BUILD = {
    "tied": lambda config: convert(Tied(), config),
    "frozen": frozen,
    "checkpoint": lambda c: Wrapped(convert(FeedForward(32, 48), c), "checkpoint"),
    "selective": lambda c: Wrapped(convert(FeedForward(32, 48), c), "selective-checkpoint"),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("what", BUILD)
def test_tied_frozen_and_checkpointed(recipe: str, what: str) -> None:
    assert_held_equals_on_the_fly(BUILD[what](of_recipe(recipe)), SHAPE)


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("tensorwise", marks=LONGER)])
def test_compiled(recipe: str) -> None:
    torch._dynamo.reset()
    model = convert(FeedForward(32, 48), of_recipe(recipe))
    assert_held_equals_on_the_fly(
        model, (2, 16, 32), compile=AOT_EAGER, autocast=torch.bfloat16, steps=2
    )


@pytest.mark.parametrize(("what", "recipe"), [("checkpoint", "delayed"), ("odd", "blockwise")])
def test_compiled_others(what: str, recipe: str) -> None:
    torch._dynamo.reset()
    if what == "odd":
        model = convert(Holder(), of_recipe(recipe))
        assert_held_equals_on_the_fly(model, (17, 33), compile=AOT_EAGER)
    else:
        assert_held_equals_on_the_fly(BUILD[what](of_recipe(recipe)), SHAPE, compile=AOT_EAGER)


@pytest.mark.parametrize(
    ("recipe", "how"), [("tensorwise", "eager"), ("blockwise", "eager"), ("delayed", "compiled")]
)
def test_each_weight_is_cast_once_per_step(recipe: str, how: str) -> None:
    """When it begins, in eager mode at the first use, and after each step."""
    torch._dynamo.reset()
    model = convert(FeedForward(32, 48), with_weights(of_recipe(recipe)))
    call = AOT_EAGER(model) if how == "compiled" else model
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
    model = convert(FeedForward(32, 48), with_weights(of_recipe("delayed")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update_float8_weights(model)
    accumulate(model, model, 0, SHAPE)
    optimizer.step()
    update_float8_weights(model)
    with pytest.raises(RuntimeError, match="sync_float8_amax_and_scale_history"):
        model(seeded(0, *SHAPE))


def test_compiled_code_that_is_handed_copies_casts_for_itself() -> None:
    torch._dynamo.reset()
    grads = []
    for weights in (ON_THE_FLY, HELD):
        torch.manual_seed(0)
        model = Wrapped(convert(FeedForward(32, 48), with_weights(None, weights)), "checkpoint")
        update_float8_weights(model)
        call = torch.compile(model, backend="aot_eager") if weights is HELD else model
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
            y = call(seeded(0, *SHAPE))
        y.square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for mine, expected in zip(*grads, strict=True):
        assert same_bits(mine, expected)
