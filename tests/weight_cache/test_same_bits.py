"""With cached weights, training has the bits of training without, and casts each weight once."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    all_linears,
    cached_weights,
    convert_to_float8_training,
    kernels,
    sync_float8_amax_and_scale_history,
)
from float8_lab.models.llama import Block, rope_table
from float8_lab.models.presets import ModelConfig
from sqnr import same_bits
from support.configs import DISABLED, FINER, MIXES, delayed, mixed, of_recipe, tensorwise
from support.devices import E4M3, E5M2, on_devices
from support.microbatches import MICROBATCHES, accumulate, steps_with_and_without
from support.models import FeedForward, fp8_state, seeded
from support.training import Wrapped

BOTH = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
EACH_FINER = pytest.mark.parametrize("config", map(of_recipe, FINER), ids=FINER)


def convert(model: nn.Module, config: Float8LinearConfig) -> nn.Module:
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def compare(model: nn.Module, shape: tuple[int, ...], **how) -> None:
    for name, without, with_cache in steps_with_and_without(model, shape, **how):
        assert same_bits(with_cache, without), name


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
@pytest.mark.parametrize("features", [(32, 48), (33, 41)], ids=["aligned", "odd"])
def test_one_layer(device: str, features: tuple[int, int], mix) -> None:
    linear = nn.Linear(*features, device=device)
    compare(convert(Holder(linear), mixed(*mix)), (17, features[0]))


@on_devices
@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_llama_block_with_fused_functions(device: str, config, dtype) -> None:
    model = LlamaBlock()
    model.block.to(dtype)
    compare(convert(model, config).to(device), (2, 16, 32))


@BOTH
def test_float32_weights_under_autocast(config) -> None:
    compare(convert(LlamaBlock(), config), (2, 16, 32), autocast=torch.bfloat16)


@pytest.mark.parametrize(
    "config",
    [
        tensorwise(round_scales_to_power_of_2=True),
        delayed(round_scales_to_power_of_2=True),
        delayed(enable_amax_init=False),
        tensorwise(emulate=True),
        Float8LinearConfig(
            cast_config_weight=CastConfig(target_dtype=E5M2),
            cast_config_grad_output=CastConfig(target_dtype=E4M3),
        ),
    ],
    ids=["power-of-2", "delayed-power-of-2", "delayed-from-one", "emulate", "e5m2"],
)
def test_switches(config) -> None:
    compare(convert(FeedForward(32, 48), config), (8, 32))


@on_devices
@EACH_FINER
@pytest.mark.parametrize("hidden", [48, 32], ids=["oblong", "square"])
def test_finer_scales(device: str, hidden: int, config) -> None:
    """Rows of very different size: the scales of rows are not those of columns."""
    model = FeedForward(32, hidden)
    for weight in model.parameters():
        weight.data *= torch.logspace(-2, 2, len(weight)).unsqueeze(1)
    compare(convert(model, config).to(device), (8, 32))


@BOTH
def test_tied_weights(config) -> None:
    compare(convert(Tied(), config), (8, 32))


@BOTH
@pytest.mark.parametrize("how", ["checkpoint", "selective-checkpoint"])
def test_activation_checkpointing(config, how: str) -> None:
    compare(Wrapped(convert(FeedForward(32, 48), config), how), (8, 32))


@BOTH
def test_frozen_weights(config) -> None:
    model = convert(FeedForward(32, 48), config)
    model.w1.weight.requires_grad_(False)
    compare(model, (8, 32))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_compiled(backend: str, config, autocast) -> None:
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend=backend, fullgraph=True)
    compare(convert(LlamaBlock(), config), (2, 16, 32), compile=compiled, autocast=autocast)


@BOTH
def test_compiled_odd_tied_and_checkpointed(config) -> None:
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
    compare(convert(Holder(nn.Linear(33, 41)), config), (17, 33), compile=compiled)
    compare(convert(Tied(), config), (8, 32), compile=compiled)
    model = Wrapped(convert(FeedForward(32, 48), config), "checkpoint")
    compare(model, (8, 32), compile=compiled)


def test_forwards_that_record_nothing_still_record_nothing() -> None:
    """A layer that is not run, or run without gradients only, has no new amax."""
    model = convert(FeedForward(32, 48), delayed())
    before = {name: b.clone() for name, b in fp8_state(model).items()}
    with cached_weights(model):
        with torch.no_grad():
            model(seeded(0, 8, 32))
        model.w1(seeded(0, 8, 32))
    for name, buffer in fp8_state(model).items():
        recorded = name in ("w1.fp8_amax_input", "w1.fp8_amax_weight")
        assert torch.equal(buffer, before[name]) != recorded, name


def test_a_step_without_a_sync_is_noticed_as_ever() -> None:
    model = convert(FeedForward(32, 48), delayed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cached_weights(model):
        optimizer.step()  # nothing was recorded: nothing is missed
        accumulate(model, model, 0, (8, 32))
        sync_float8_amax_and_scale_history(model)
        optimizer.step()
        accumulate(model, model, 0, (8, 32))
    optimizer.step()
    with pytest.raises(RuntimeError, match="sync_float8_amax_and_scale_history"):
        model(seeded(0, 8, 32))


# ---------------------------------------------------------------- fewer casts


@contextmanager
def counting_casts_of(weights: list[Tensor]) -> Iterator[Counter[str]]:
    """Counts casts of these very tensors; the ops' names."""
    counts: Counter[str] = Counter()
    ids = {id(weight) for weight in weights}

    def counted(name: str):
        op = getattr(kernels, name)

        def run(x: Tensor, *args, **kwargs):
            counts[name] += id(x) in ids
            return op(x, *args, **kwargs)

        return mock.patch.object(kernels, name, run)

    with counted("cast"), counted("cast_dynamic"), counted("cast_delayed"):
        yield counts


@BOTH
@pytest.mark.parametrize("build", [lambda: FeedForward(32, 48), LlamaBlock, Tied])
def test_each_weight_is_cast_once_per_step(config, build) -> None:
    model = convert(build(), config)
    layers = [layer for layer in model.modules() if isinstance(layer, Float8Linear)]
    weights = [layer.weight for layer in layers]
    shape = (2, 16, 32)
    with counting_casts_of(weights) as counts:
        accumulate(model, model, 0, shape)
    assert counts.total() == 2 * MICROBATCHES * len(layers)
    with counting_casts_of(weights) as counts, cached_weights(model):
        accumulate(model, model, 0, shape)
    # With delayed scaling each layer has a scale of its own.
    assert counts.total() == len(layers if config == delayed() else set(weights))
    with counting_casts_of(weights) as counts:  # and afterwards as before
        accumulate(model, model, 0, shape)
    assert counts.total() == 2 * MICROBATCHES * len(layers)


def test_layers_that_cast_the_weight_otherwise_are_left_alone() -> None:
    own = CastConfig(scaling_type=ScalingType.DYNAMIC, target_dtype=E5M2)
    for config in (
        Float8LinearConfig(
            cast_config_weight_for_grad_input=own,
            cast_config_grad_output=CastConfig(target_dtype=E4M3),
        ),
        Float8LinearConfig(
            cast_config_grad_output=DISABLED,
            cast_config_weight_for_grad_input=DISABLED,
            cast_config_grad_output_for_grad_weight=CastConfig(target_dtype=E5M2),
        ),
    ):
        model = convert(FeedForward(32, 48), config)
        with cached_weights(model):
            assert all(linear.weight_cache is None for linear in (model.w1, model.w2, model.w3))
        compare(model, (8, 32))
