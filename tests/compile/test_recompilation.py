"""What must not make Dynamo compile again, or give up; what it must not look into."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from float8 import (
    DelayedScalingConfig,
    Float8Linear,
    attach_to_optimizer,
    sync_float8_amax_and_scale_history,
)
from float8.kernels.runtime.private import untraced
from sqnr import assert_close
from support.configs import delayed, tensorwise
from support.models import fp8_state, seeded
from support.rings import short
from support.training import one_layer, two_layers


@pytest.mark.parametrize(
    "config", short({0}, [tensorwise(), delayed()]), ids=["dynamic", "delayed"]
)
def test_dynamic_shapes_from_the_start_and_columns_that_were_padded(config) -> None:
    layer = Float8Linear.from_float(nn.Linear(32, 10, bias=False), config)
    compiled = torch.compile(layer, dynamic=True, backend="aot_eager", fullgraph=True)
    for tokens in (16, 40):
        x = torch.randn(tokens, 32)
        for run in (layer, compiled):
            output = run(x)
            assert torch.equal(output, layer(x))
            assert output.is_contiguous()
            assert output.view(-1).shape == (10 * tokens,)
            torch.relu_(output).sum().backward()


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_evaluation_costs_one_graph_more_and_records_nothing(backend: str) -> None:
    """Nor is it a missing sync, nor training for a rank that tells others what it ran."""
    model = one_layer(delayed())
    (layer,) = (module for module in model.modules() if isinstance(module, Float8Linear))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = seeded(0, 8, 32)
    for _ in range(2):
        compiled(x).sum().backward()
        assert layer._float8_has_unsynced_amax()
        sync_float8_amax_and_scale_history(compiled)
        before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
        with torch.no_grad():
            compiled(1000 * x)
        assert not layer._float8_has_unsynced_amax()
        assert_close(before, fp8_state(model))
        optimizer.step()
    assert counter.frame_count == 2
    for training in (False, True, False):
        model.train(training)
        compiled(x).sum().backward()
    assert counter.frame_count == 3


@pytest.mark.parametrize("passed", short({0}, [False, True]), ids=["closed-over", "argument"])
def test_a_sync_compiles_whole(passed: bool) -> None:
    scaling = DelayedScalingConfig(3, "most_recent" if passed else "max")
    model = two_layers(delayed(delayed_scaling_config=scaling))
    eager = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    how = {"backend": counter, "fullgraph": True}
    sync = torch.compile(
        lambda given: sync_float8_amax_and_scale_history(given if passed else model), **how
    )
    for step in range(5):
        for each in (model, eager):
            each(seeded(step, 16, 32)).sum().backward()
        sync(model)
        sync_float8_amax_and_scale_history(eager)
        assert_close(fp8_state(eager), fp8_state(model))
    assert counter.frame_count == 1


def test_an_optimizer_syncs_the_compiled_model_it_is_attached_to() -> None:
    model = one_layer(delayed())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    attach_to_optimizer(compiled, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    compiled(seeded(0, 16, 32)).sum().backward()
    optimizer.step()
    assert all(b[0] > 0 for name, b in fp8_state(model).items() if "history" in name)


seen: list[bool] = []


@untraced
def looked_at(x: Tensor) -> Tensor:
    """Its own."""
    seen.append(torch.compiler.is_compiling())
    return x * 3


def test_compiled_code_calls_it_in_eager_mode() -> None:
    seen.clear()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda x: looked_at(x + 1) - 1, backend=counter)
    x = torch.ones(3)
    for _ in range(3):
        assert torch.equal(run(x), torch.full((3,), 5.0))
    assert seen == [False] * 3
    assert counter.frame_count == 2  # before and after it
    assert looked_at.__doc__ == "Its own."
