"""Compiled training: one graph, no recompilation, and the results of eager mode; CUDA graphs."""

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

import tolerances
from float8 import update_float8_weights
from float8.config import Float8LinearConfig, Float8LinearRecipeName
from float8.kernels.runtime import private
from float8_lab.bench.model import Size, model_step
from float8_lab.bench.variants import COMPILED, EAGER, Variant, make_variants
from sqnr import sqnr
from support.configs import DELAYED, DYNAMIC, MIXES, delayed, mixed, tensorwise
from support.devices import on_devices
from support.microbatches import with_weights
from support.models import fp8_state, seeded
from support.rings import short
from support.training import SideBySide, one_layer, two_layers

VARIANTS = ["plain", "autocast", "checkpoint"]


def train(
    config,
    device: str,
    backend: str,
    variant: str = "plain",
    *,
    bound: float = math.inf,
    build: Callable[..., nn.Module] = two_layers,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Four steps with a sync after each; fails on a graph break or a recompilation."""
    how = variant.replace("autocast", "").strip() or "plain"
    autocast = torch.bfloat16 if "autocast" in variant else None
    both = SideBySide(build(config, device, how).to(dtype), backend)
    for seed in range(4):
        both.step(seed, bound, autocast=autocast)
    assert both.counter.frame_count == 1


POWERS_OF_2 = {"round_scales_to_power_of_2": True}


# Not "checkpoint" with delayed scaling and "eager": torch's checkpoint, when this backend really
# runs it, refuses every buffer that is written inside of it (an nn.BatchNorm1d, for example).
@pytest.mark.parametrize(
    ("backend", "variant", "config"),
    short(
        {7, 8},
        [
            # Any two roles meet in all ways.
            ("eager", "plain", mixed(DYNAMIC, DYNAMIC, DYNAMIC)),
            ("aot_eager", "plain bfloat16", mixed(DYNAMIC, DELAYED, DELAYED)),
            ("aot_eager", "autocast", mixed(DELAYED, DYNAMIC, DELAYED)),
            ("aot_eager", "plain float16", mixed(DELAYED, DELAYED, DYNAMIC)),
            ("eager", "checkpoint", tensorwise()),
            ("eager", "autocast", delayed()),
            ("aot_eager", "checkpoint", delayed()),
            ("aot_eager", "selective-checkpoint", tensorwise(**POWERS_OF_2)),
            ("aot_eager", "plain", delayed(enable_amax_init=False, **POWERS_OF_2)),
            ("aot_eager", "plain", tensorwise(emulate=True)),
        ],
    ),
)
def test_bits_are_those_of_eager_mode(backend: str, variant: str, config) -> None:
    build = two_layers if backend != "eager" and "checkpoint" in variant else one_layer
    variant, _, parameters = variant.partition(" ")
    dtype = getattr(torch, parameters or "float32")
    train(config, "cpu", backend, variant, build=build, dtype=dtype)


def test_backward_casts_again_without_what_forward_wrote() -> None:
    """This backend writes amaxes after forward: nothing that is kept for backward may be one."""
    both = SideBySide(one_layer(delayed(), how="checkpoint"), "aot_eager_decomp_partition")
    for seed in range(3):
        both.step(seed, tolerances.COMPILED)
        torch.testing.assert_close(fp8_state(both.copy), fp8_state(both.model))


# Inductor keeps in float32 what eager mode rounds to bfloat16; then casts see values 2**-9 apart
# and results differ by as much as float8 itself is off. This makes the two comparable.
INDUCTOR_ROUNDS_AS_EAGER = inductor_config.patch(emulate_precision_casts=True)


LONGER = pytest.mark.exhaustive


@on_devices
@pytest.mark.parametrize(
    ("build", "variant"),
    [
        (one_layer, "plain"),
        pytest.param(one_layer, "autocast selective-checkpoint", marks=LONGER),
        pytest.param(one_layer, "autocast checkpoint", marks=LONGER),
        pytest.param(two_layers, "plain", marks=LONGER),
    ],
)
def test_inductor(device: str, build: Callable[..., nn.Module], variant: str) -> None:
    if device == "cpu" and variant != "plain" and torch.__version__ < "2.13":
        pytest.skip("Inductor for CPUs ignores emulate_precision_casts before torch 2.13")
    how = {"bound": tolerances.COMPILED, "build": build}
    with INDUCTOR_ROUNDS_AS_EAGER if variant != "plain" else nullcontext():
        train(mixed(DYNAMIC, DELAYED, DELAYED), device, "inductor", variant, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mix", MIXES)
def test_inductor_with_bfloat16_parameters_on_a_gpu(mix, variant: str) -> None:
    how = {"bound": tolerances.COMPILED, "dtype": torch.bfloat16}
    with INDUCTOR_ROUNDS_AS_EAGER:
        train(mixed(*mix), "cuda", "inductor", variant, **how)


DYNAMIC_AND_DELAYED = pytest.mark.parametrize(
    "config", [tensorwise(), delayed()], ids=["dynamic", "delayed"]
)


def replayed(model: nn.Module) -> SideBySide:
    torch._dynamo.utils.counters.clear()
    return SideBySide(model, mode="reduce-overhead")


def replay(both: SideBySide, seed: int) -> None:
    torch.compiler.cudagraph_mark_step_begin()
    both.step(seed, tolerances.COMPILED)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
@DYNAMIC_AND_DELAYED
@pytest.mark.parametrize("how", ["plain", "checkpoint"])
def test_reduce_overhead_replays_graphs_with_the_results_of_eager_mode(config, how: str) -> None:
    both = replayed(two_layers(config, "cuda", how))
    for seed in range(5):
        replay(both, seed)
    assert torch._inductor.cudagraph_trees.get_container(0).tree_manager is not None  # did run


@pytest.mark.gpu
@DYNAMIC_AND_DELAYED
@pytest.mark.parametrize("updated", [True, False])
def test_held_weights_are_read_as_they_are_in_each_step(config, updated: bool) -> None:
    """A graph records the cast: it sees what was written, whether anybody tells of it or not."""
    both, kept = replayed(two_layers(with_weights(config), "cuda")), []
    for seed in range(6):
        kept.append(torch.empty(2 * 32 * 64, dtype=torch.uint8, device="cuda"))  # moves the next
        if updated or seed == 0:
            update_float8_weights(both.copy)
        replay(both, seed)
        for model in (both.model, both.copy):
            with torch.no_grad():
                for index, parameter in enumerate(model.parameters()):
                    parameter.mul_(1.5 if (seed + index) % 2 else -0.8)


def test_what_compiled_code_writes_lies_where_it_lay() -> None:
    """In buffers of the module: Inductor would skip CUDA graphs that write anything else."""
    found: list[tuple[set[int], set[int], bool]] = []

    def inner(graph, inputs, **how):
        made = compile_fx_inner(graph, inputs, **how)
        casts_and_measures = "cast_delayed" in graph.print_readable(print_output=False)
        found.append(({*made.mutated_input_idxs}, {*how["static_input_idxs"]}, casts_and_measures))
        return made

    def backend(graph, inputs):
        return compile_fx(graph, inputs, inner_compile=inner)

    model = torch.compile(one_layer(delayed()), backend=backend, fullgraph=True)
    model(seeded(0, 16, 32).requires_grad_()).sum().backward()
    assert [len(written) for written, *_ in found] == [2, 1]  # the amaxes
    assert all(written <= static for written, static, _ in found)
    # Those of forward are taken by code that is fused into what computes the tensor.
    assert [measures for *_, measures in found] == [False, True]


LOST = 0.5
"""At most so many dB: sums in another order, and values that Inductor does not round to bf16."""


def results_of(variant: Variant) -> dict[str, Tensor]:
    step = model_step(variant, Size("150m", blocks=1, seq_len=4096), torch.device("cuda"))
    step.warm_up()
    return {name: x.clone() for name, x in step().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [x.value for x in Float8LinearRecipeName if "mx" not in x.value])
def test_a_block_loses_nothing_by_being_compiled(recipe: str) -> None:
    torch._dynamo.reset()
    (bf16, eager), (_, compiled) = (make_variants([recipe], [mode]) for mode in (EAGER, COMPILED))
    with torch._dynamo.config.patch(recompile_limit=256):
        exact, one, other = (results_of(variant) for variant in (bf16, eager, compiled))
    assert len(exact) > 7
    for name, expected in exact.items():
        assert sqnr(expected, other[name]) > sqnr(expected, one[name]) - LOST, name


@pytest.mark.parametrize(
    "config", short({1}, [tensorwise(), delayed()]), ids=["dynamic", "delayed"]
)
def test_compiled_autograd_has_the_gradients_of_eager_mode(config: Float8LinearConfig) -> None:
    if config.delayed_sites and private.PUBLIC_API_ONLY:
        pytest.skip("FLOAT8_PLAIN_LAUNCH=1: nothing asks whether compiled autograd is on")
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = one_layer(config)
        forward, around = model, nullcontext()
        if compiled:
            forward = torch.compile(model, backend="aot_eager")
            around = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
        with around:
            forward(seeded(0, 16, 32)).square().sum().backward()
        amaxes = [x for name, x in model.named_buffers() if "amax" in name]
        results.append([*(p.grad for p in model.parameters()), *amaxes])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
