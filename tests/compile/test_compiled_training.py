"""Compiled training: one graph, no recompilation, and the results of eager mode."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config

import tolerances
from float8 import all_linears, convert_to_float8_training
from sqnr import same_bits, sqnr
from support.configs import MIXES, delayed, mixed, tensorwise
from support.devices import on_devices
from support.models import FeedForward, fp8_state
from support.training import SideBySide, Wrapped, one_layer, two_layers

VARIANTS = ["plain", "autocast", "checkpoint"]


def train(
    config,
    device: str,
    backend: str,
    variant: str,
    *,
    build: Callable[..., nn.Module] = two_layers,
    dtype: torch.dtype = torch.float32,
) -> list[dict]:
    """Four steps with a sync after each; fails on a graph break or a recompilation."""
    how = variant if "checkpoint" in variant else "plain"
    counter = CompileCounterWithBackend(backend)
    both = SideBySide(
        build(config, device, how).to(dtype),
        lambda m: torch.compile(m, backend=counter, fullgraph=True),
    )
    autocast = torch.bfloat16 if variant == "autocast" else None
    steps = [both.step(seed, autocast=autocast) for seed in range(4)]
    assert counter.frame_count == 1
    return steps


def assert_same_bits(steps: list[dict]) -> None:
    for index, step in enumerate(steps):
        for name, (wanted, got) in step.items():
            assert same_bits(got, wanted), (index, name)


def assert_close(steps: list[dict], bound: float) -> None:
    for index, step in enumerate(steps):
        for name, (wanted, got) in step.items():
            assert got.dtype == wanted.dtype, (index, name)
            if bool((wanted == 0).all()):
                assert same_bits(got, wanted), (index, name)
            else:
                assert sqnr(wanted, got) > bound, (index, name)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mix", MIXES)
def test_aot_eager_has_the_bits_of_eager_mode(mix, variant: str) -> None:
    build = two_layers if variant == "checkpoint" else one_layer
    assert_same_bits(train(mixed(*mix), "cpu", "aot_eager", variant, build=build))


# Not "checkpoint" with delayed scaling: torch's checkpoint, when this backend really runs it,
# refuses every buffer that is written inside of it (a torch 2.13 nn.BatchNorm1d, for example).
@pytest.mark.parametrize(
    ("mix", "variant"),
    [
        pytest.param(mix.values[0], variant, id=f"{mix.id}-{variant}")
        for mix in MIXES
        for variant in VARIANTS
        if variant != "checkpoint" or mix is MIXES[0]
    ],
)
def test_backend_eager_has_the_bits_of_eager_mode(mix, variant: str) -> None:
    assert_same_bits(train(mixed(*mix), "cpu", "eager", variant, build=one_layer))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mix", MIXES[::7])
def test_captured_as_one_graph_on_a_gpu(mix, variant: str) -> None:
    assert_same_bits(train(mixed(*mix), "cuda", "aot_eager", variant))


def checkpointed_feed_forward(fuse: bool) -> nn.Module:
    model = FeedForward(32, 64)
    convert_to_float8_training(model, config=delayed(), module_filter_fn=all_linears, fuse=fuse)
    return Wrapped(model, "checkpoint")


@pytest.mark.parametrize("fuse", [False, True])
def test_backward_casts_again_without_what_forward_wrote(fuse: bool) -> None:
    """This backend writes amaxes after forward: nothing that is kept for backward may be one."""
    both = SideBySide(
        checkpointed_feed_forward(fuse),
        lambda m: torch.compile(m, backend="aot_eager_decomp_partition", fullgraph=True),
    )
    for seed in range(3):
        both.step(seed)
        wanted, got = fp8_state(both.model), fp8_state(both.copy)
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
def test_selective_checkpointing_under_compile(config) -> None:
    assert_same_bits(train(config, "cpu", "aot_eager", "selective-checkpoint"))


@pytest.mark.parametrize(
    "config",
    [
        tensorwise(round_scales_to_power_of_2=True),
        delayed(round_scales_to_power_of_2=True),
        delayed(enable_amax_init=False),
        tensorwise(emulate=True),
    ],
    ids=["dynamic-power-of-2", "delayed-power-of-2", "delayed-from-one", "emulate"],
)
def test_switches_under_compile(config) -> None:
    assert_same_bits(train(config, "cpu", "aot_eager", "plain", build=one_layer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_under_compile(dtype: torch.dtype) -> None:
    assert_same_bits(train(delayed(), "cpu", "aot_eager", "plain", build=one_layer, dtype=dtype))


# Inductor keeps in float32 what eager mode rounds to bfloat16; then casts see values 2**-9 apart
# and results differ by as much as float8 itself is off. This makes the two comparable.
INDUCTOR_ROUNDS_AS_EAGER = inductor_config.patch(emulate_precision_casts=True)


# Those 4 of the 8 mixes in which any two roles meet in all ways. All delayed is tested below, too.
SOME = [pytest.param("cpu", *MIXES[n].values, id=f"{MIXES[n].id}-cpu") for n in (0, 3, 5, 6)]
REST = [
    pytest.param("cpu", *MIXES[n].values, id=f"{MIXES[n].id}-cpu", marks=pytest.mark.exhaustive)
    for n in (1, 2, 4, 7)
]
ON_A_GPU = [
    pytest.param("cuda", *m.values, id=f"{m.id}-cuda", marks=pytest.mark.gpu) for m in MIXES
]


@pytest.mark.parametrize(("device", "mix"), SOME + REST + ON_A_GPU)
def test_inductor(device: str, mix) -> None:
    assert_close(train(mixed(*mix), device, "inductor", "plain"), tolerances.COMPILED)


@on_devices
@pytest.mark.parametrize(
    ("config", "variant"),
    [
        (tensorwise(), "autocast"),
        (delayed(), "autocast"),
        (delayed(), "checkpoint"),
        (delayed(), "selective-checkpoint"),
    ],
    ids=["dynamic-autocast", "delayed-autocast", "delayed-checkpoint", "delayed-selective"],
)
def test_inductor_with_autocast_and_checkpointing(device: str, config, variant: str) -> None:
    if device == "cpu" and variant == "autocast" and torch.__version__ < "2.13":
        pytest.skip("Inductor for CPUs ignores emulate_precision_casts before torch 2.13")
    with INDUCTOR_ROUNDS_AS_EAGER:
        assert_close(train(config, device, "inductor", variant), tolerances.COMPILED)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mix", MIXES)
def test_inductor_with_bfloat16_parameters_on_a_gpu(mix, variant: str) -> None:
    with INDUCTOR_ROUNDS_AS_EAGER:
        steps = train(mixed(*mix), "cuda", "inductor", variant, dtype=torch.bfloat16)
    assert_close(steps, tolerances.COMPILED)
