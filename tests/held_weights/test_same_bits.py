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
from float8_lab.models.llama import Block, rope_table
from float8_lab.models.presets import ModelConfig
from sqnr import same_bits
from support.configs import MIXES, delayed, mixed, of_recipe, tensorwise
from support.devices import E4M3, E5M2, on_devices
from support.microbatches import (
    HELD,
    ON_THE_FLY,
    accumulate,
    assert_held_equals_on_the_fly,
    counting_casts,
    layers_of,
    model_of,
    with_weights,
)
from support.models import FeedForward, fp8_state, seeded
from support.training import Wrapped

FINER = ["rowwise", "blockwise"]
BOTH = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])


def convert(model: nn.Module, config: Float8LinearConfig) -> nn.Module:
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


class Holder(nn.Module):
    """One layer after something that needs a gradient."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.silu(x))


class LlamaBlock(nn.Module):
    """A block of the reference model, which calls the fused functions."""

    def __init__(self) -> None:
        super().__init__()
        config = ModelConfig(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=48)
        self.block = Block(config)
        for index, (cut, table) in enumerate(zip("cs", rope_table(16, 16, 1e4), strict=True)):
            self.register_buffer(f"table_{cut}{index}", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.table_c0, self.table_s1)


class Tied(nn.Module):
    """Two layers, one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())


# ---------------------------------------------------------------- the same bits


@on_devices
@pytest.mark.parametrize("mix", MIXES)
def test_one_layer_of_odd_shape(device: str, mix) -> None:
    model = convert(Holder(nn.Linear(33, 41, device=device)), mixed(*mix))
    assert_held_equals_on_the_fly(model, (17, 33))


@on_devices
@BOTH
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["bfloat16", "autocast"])
def test_llama_block_with_fused_functions(device: str, config, autocast) -> None:
    """In bfloat16, and with float32 weights under autocast."""
    model = LlamaBlock().to(torch.bfloat16 if autocast is None else torch.float32)
    model = convert(model, config).to(device)
    assert_held_equals_on_the_fly(model, (2, 16, 32), autocast=autocast)


@pytest.mark.parametrize(
    "config",
    [
        delayed(round_scales_to_power_of_2=True),
        delayed(enable_amax_init=False),
        tensorwise(emulate=True),
        Float8LinearConfig(
            cast_config_weight=CastConfig(target_dtype=E5M2),
            cast_config_grad_output=CastConfig(target_dtype=E4M3),
        ),
    ],
    ids=["delayed-power-of-2", "delayed-from-one", "emulate", "e5m2"],
)
def test_switches(config) -> None:
    assert_held_equals_on_the_fly(convert(FeedForward(32, 48), config), (8, 32))


@on_devices
@pytest.mark.parametrize("recipe", FINER)
def test_finer_scales(device: str, recipe: str) -> None:
    """Rows of very different size: the scales of rows are not those of columns."""
    model = FeedForward(32, 48)
    for weight in model.parameters():
        weight.data *= torch.logspace(-2, 2, len(weight)).unsqueeze(1)
    assert_held_equals_on_the_fly(convert(model, of_recipe(recipe)).to(device), (8, 32))


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


@BOTH
@pytest.mark.parametrize("what", BUILD)
def test_tied_frozen_and_checkpointed(config, what: str) -> None:
    assert_held_equals_on_the_fly(BUILD[what](config), (8, 32))


@pytest.mark.parametrize(
    "config",
    [delayed(), pytest.param(tensorwise(), marks=pytest.mark.exhaustive)],
    ids=["delayed", "dynamic"],
)
def test_compiled(config) -> None:
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
    model = convert(LlamaBlock(), config)
    assert_held_equals_on_the_fly(model, (2, 16, 32), compile=compiled, autocast=torch.bfloat16)
    compiled = partial(torch.compile, backend="inductor", fullgraph=True)
    model = convert(Tied(), config)
    assert_held_equals_on_the_fly(model, (8, 32), compile=compiled, compile_both=True, steps=2)


@pytest.mark.parametrize("what", ["odd", "tied", "checkpoint", *FINER])
def test_compiled_others(what: str) -> None:
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
    for config in [of_recipe(what)] if what in FINER else [tensorwise(), delayed()]:
        if what in FINER or what == "odd":
            model = convert(Holder(nn.Linear(33, 41)), config)
            assert_held_equals_on_the_fly(model, (17, 33), compile=compiled)
        else:
            assert_held_equals_on_the_fly(BUILD[what](config), (8, 32), compile=compiled)


# ---------------------------------------------------------------- casts and amaxes


@pytest.mark.parametrize("how", ["eager", "compiled"])
@BOTH
def test_each_weight_is_cast_once_per_step(config, how: str) -> None:
    """With delayed scaling, where each layer has a scale of its own, once for each layer."""
    torch._dynamo.reset()
    model = convert(Tied(), with_weights(config))
    call = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    times = 2 if config == delayed() else 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    attach_to_optimizer(model, optimizer)
    update_float8_weights(model)
    with counting_casts() as casts:
        for step in range(1, 4):
            accumulate(model, call, step, (8, 32))
            optimizer.step()
            assert casts == {model.one.weight.data_ptr(): step * times}


def test_forwards_that_record_nothing_still_record_nothing() -> None:
    """A layer that is not run, or run without gradients only, has no new amax."""
    model = model_of(with_weights(delayed()))
    before = {name: b.clone() for name, b in fp8_state(model).items()}
    update_float8_weights(model)
    with torch.no_grad():
        model(seeded(0, 8, 32))
    model.w1(seeded(0, 8, 32))
    for name, buffer in fp8_state(model).items():
        recorded = name in ("w1.fp8_amax_input", "w1.fp8_amax_weight")
        assert torch.equal(buffer, before[name]) != recorded, name


def test_a_step_without_a_sync_is_noticed_as_ever() -> None:
    model = model_of(with_weights(delayed()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update_float8_weights(model)
    accumulate(model, model, 0, (8, 32))
    optimizer.step()
    update_float8_weights(model)
    assert all(layer.held is not None for layer in layers_of(model))
    with pytest.raises(RuntimeError, match="sync_float8_amax_and_scale_history"):
        model(seeded(0, 8, 32))


def test_compiled_code_that_is_handed_copies_casts_for_itself() -> None:
    """As offloading of activations hands them to what backward computes again."""
    torch._dynamo.reset()
    grads = []
    for weights in (ON_THE_FLY, HELD):
        torch.manual_seed(0)
        model = Wrapped(convert(FeedForward(32, 48), with_weights(None, weights)), "checkpoint")
        update_float8_weights(model)
        call = torch.compile(model, backend="aot_eager")
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
            y = call(seeded(0, 8, 32))
        y.square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for mine, expected in zip(*grads, strict=True):
        assert same_bits(mine, expected)
