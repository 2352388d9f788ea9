"""Training with weights held in float8 has the bits of casting on the fly; each is cast once."""

import itertools
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
from support.devices import E4M3, E5M2, GPU
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
from support.rings import short
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


def plain(config: Float8LinearConfig) -> nn.Module:
    return convert(FeedForward(32, 48), config)


def frozen(config: Float8LinearConfig) -> nn.Module:
    model = plain(config)
    model.w1.weight.requires_grad_(False)
    return model


def odd(config: Float8LinearConfig) -> nn.Module:
    return convert(Holder(), config)


def checkpointed(config: Float8LinearConfig) -> nn.Module:
    return Wrapped(plain(config), "checkpoint")


LONGER = pytest.mark.exhaustive
ODD, TOKENS = (17, 33), (2, 16, 32)
ON_GPUS: list[tuple[Any, ...]] = [
    *((odd, recipe, ODD, {}) for recipe in (*RECIPES, "rowwise", "blockwise")),
    *((lambda c: plain(c).bfloat16(), recipe, TOKENS, {}) for recipe in RECIPES),
    *((plain, recipe, TOKENS, {"autocast": torch.bfloat16}) for recipe in RECIPES),
]
SWITCHES = [
    of_recipe("delayed", round_scales_to_power_of_2=True, enable_amax_init=False),
    tensorwise(emulate=True),
    Float8LinearConfig(
        cast_config_weight=CastConfig(target_dtype=E5M2),
        cast_config_grad_output=CastConfig(target_dtype=E4M3),
    ),
    delayed(),  # of the weight, too
]
WAYS = [
    lambda config: convert(Tied(), config),
    frozen,
    checkpointed,
    lambda config: Wrapped(plain(config), "selective-checkpoint"),
]
ROWS = [pytest.param("cpu", *row) for row in ON_GPUS]
ROWS += [pytest.param("cuda", *row, marks=GPU) for row in ON_GPUS]
ROWS += [pytest.param("cpu", plain, config, SHAPE, {}) for config in SWITCHES]
ROWS += [pytest.param("cpu", *row, SHAPE, {}) for row in itertools.product(WAYS, RECIPES)]
COMPILED: dict[str, Any] = {"compile": MODES["aot_eager"]}
AUTOCAST = COMPILED | {"autocast": torch.bfloat16, "steps": 2}
ROWS += [
    pytest.param("cpu", plain, "delayed", TOKENS, AUTOCAST, marks=LONGER),
    pytest.param("cpu", odd, "blockwise", ODD, COMPILED, marks=LONGER),
    pytest.param("cpu", checkpointed, "delayed", SHAPE, COMPILED, marks=LONGER),
]


@pytest.mark.parametrize(("device", "build", "config", "shape", "more"), ROWS)
def test_trained(device: str, build: Any, config: Any, shape: Any, more: dict[str, Any]) -> None:
    """However weights are used, and by whatever recipe they are cast."""
    torch._dynamo.reset()
    config = of_recipe(config) if isinstance(config, str) else config
    assert_held_equals_on_the_fly(build(config).to(device), shape, **more)


@pytest.mark.parametrize(
    ("recipe", "mode"),
    short({0}, [("tensorwise", "eager"), ("blockwise", "eager"), ("delayed", "aot_eager")]),
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


@pytest.mark.exhaustive
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
