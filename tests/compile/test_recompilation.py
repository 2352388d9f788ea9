"""What must not make Dynamo compile again, or give up."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from float8 import (
    Float8Linear,
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from sqnr import same_bits
from support.configs import DELAYED, DYNAMIC, MIXES, delayed, mixed
from support.models import Block, FeedForward, fp8_state, seeded
from support.training import SideBySide, one_layer, two_layers

# At its recompile limit Dynamo would run the rest in eager mode, without an error.
NO_GIVING_UP = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)


@pytest.mark.parametrize("mix", MIXES[::7])
def test_token_counts_recompile_at_most_once(mix) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    both = SideBySide(
        one_layer(mixed(*mix)), lambda m: torch.compile(m, backend=counter, fullgraph=True)
    )
    for seed, tokens in enumerate((16, 24, 7, 33, 2, 160)):
        for name, (wanted, got) in both.step(seed, tokens=tokens).items():
            assert same_bits(got, wanted), (tokens, name)
    assert counter.frame_count <= 2


def blocks(n: int, config) -> nn.Sequential:
    model = nn.Sequential(*(Block(16, 32) for _ in range(n)))
    return convert_to_float8_training(model, config=config)


def train(model: nn.Module, seed: int) -> None:
    model(seeded(seed, 8, 16)).sum().backward()
    sync_float8_amax_and_scale_history(model)


@NO_GIVING_UP
def test_twelve_blocks_compiled_one_by_one_share_one_graph() -> None:
    model = blocks(12, delayed())
    eager = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    for step in range(2):
        train(model, step)
        train(eager, step)
    # The first block's input needs no gradient, the others' do.
    assert counter.frame_count <= 2
    for (name, got), wanted in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert same_bits(got.grad, wanted.grad), name


@NO_GIVING_UP
def test_modules_of_one_configuration_share_one_graph() -> None:
    """Four modules, two configurations: two graphs."""
    modules = [FeedForward(16, 32) for _ in range(4)]
    counter = CompileCounterWithBackend("eager")
    for index, module in enumerate(modules):
        config = mixed(DELAYED if index % 2 else DYNAMIC, DYNAMIC, DYNAMIC)
        convert_to_float8_training(module, config=config)
        module.compile(backend=counter, fullgraph=True)
    for _ in range(2):
        for module in modules:
            module(seeded(0, 8, 16).requires_grad_()).sum().backward()
            sync_float8_amax_and_scale_history(module)
    assert counter.frame_count == 2


def test_inference_costs_one_graph_more_and_records_nothing() -> None:
    model = one_layer(delayed())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = seeded(0, 8, 32)
    for _ in range(2):
        compiled(x).sum().backward()
        sync_float8_amax_and_scale_history(compiled)
        before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
        with torch.no_grad():
            compiled(1000 * x)
        assert all(torch.equal(b, before[n]) for n, b in fp8_state(model).items())
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_evaluation_between_sync_and_step_is_no_missing_sync(backend: str) -> None:
    """Nor does it count as training for a rank that tells others what it ran."""
    model = one_layer(delayed())
    (layer,) = (module for module in model.modules() if isinstance(module, Float8Linear))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = seeded(0, 8, 32)
    for _ in range(2):
        compiled(x).sum().backward()
        assert layer.has_unsynced_amax()
        sync_float8_amax_and_scale_history(compiled)
        with torch.no_grad():
            compiled(x)
        assert not layer.has_unsynced_amax()
        optimizer.step()


def test_each_mode_is_compiled_once() -> None:
    model = one_layer(delayed())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for training in (True, False, True, False):
        model.train(training)
        compiled(seeded(0, 16, 32)).sum().backward()
    assert counter.frame_count == 2


@pytest.mark.parametrize("passed", [False, True], ids=["closed-over", "argument"])
def test_a_sync_compiles_whole(passed: bool) -> None:
    model = two_layers(delayed())
    eager = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    sync = torch.compile(
        sync_float8_amax_and_scale_history
        if passed
        else lambda _: sync_float8_amax_and_scale_history(model),
        backend=counter,
        fullgraph=True,
    )
    for step in range(4):
        for each in (model, eager):
            each(seeded(step, 16, 32)).sum().backward()
        sync(model)
        sync_float8_amax_and_scale_history(eager)
        for name, buffer in fp8_state(model).items():
            assert same_bits(buffer, fp8_state(eager)[name]), name
    assert counter.frame_count == 1


@pytest.mark.parametrize("model_is_compiled", [False, True], ids=["inner", "wrapper"])
def test_attach_to_optimizer_works_for_compiled_models(model_is_compiled: bool) -> None:
    model, eager = one_layer(delayed()), one_layer(delayed())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for module, call, attached in (
        (model, compiled, compiled if model_is_compiled else model),
        (eager, eager, eager),
    ):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        attach_to_optimizer(attached, optimizer)
        for step in range(4):
            call(seeded(step, 16, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counter.frame_count == 1
    for (name, got), wanted in zip(
        model.state_dict().items(), eager.state_dict().values(), strict=True
    ):
        assert same_bits(got, wanted), name
