"""Compiled code takes cached weights as inputs of its graph: one graph more, however many steps."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from float8 import (
    cached_weights,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import delayed, tensorwise
from support.models import Block, seeded
from support.training import Wrapped

NO_GIVING_UP = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
CONFIGS = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])


class Recorder:
    """A backend that keeps the graphs."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.counter = CompileCounterWithBackend("aot_eager")

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return self.counter(graph, inputs)


def blocks(n: int, config, how: str = "plain") -> nn.Sequential:
    model = nn.Sequential(*(Wrapped(Block(16, 32), how) for _ in range(n)))
    return convert_to_float8_training(model, config=config)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, cached) -> None:
    with cached:
        for microbatch in range(2):
            x = seeded(2 * seed + microbatch, 8, 16).requires_grad_()
            model(x).sum().backward()
    sync_float8_amax_and_scale_history(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@NO_GIVING_UP
@CONFIGS
@pytest.mark.parametrize("how", ["plain", "checkpoint"])
@pytest.mark.parametrize("again", [False, True], ids=["made-anew", "entered-again"])
def test_one_graph_for_all_layers_and_steps(config, how: str, again: bool) -> None:
    model = blocks(4, config, how)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    caching, kept = cached_weights(model), []
    for seed in range(5):
        # What stays allocated makes sure that the next operands lie elsewhere.
        kept.append(torch.empty(16 * 32 * 2 * 12, dtype=torch.uint8))
        step(model, optimizer, seed, caching if again else cached_weights(model))
    assert counter.frame_count == 1


@NO_GIVING_UP
@CONFIGS
def test_two_graphs_with_steps_without_in_between(config) -> None:
    model = blocks(4, config)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(6):
        step(model, optimizer, seed, cached_weights(model) if seed % 2 else torch.enable_grad())
    assert counter.frame_count == 2


@NO_GIVING_UP
@CONFIGS
def test_steps_inside_cost_no_graph(config) -> None:
    model = blocks(2, config)
    compiled = torch.compile(model, backend=(recorder := Recorder()), fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with cached_weights(model):
        for seed in range(5):
            step(compiled, optimizer, seed, torch.enable_grad())
    assert len(recorder.graphs) == 1


@CONFIGS
def test_token_counts_recompile_at_most_once(config) -> None:
    model = blocks(1, config)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with cached_weights(model):
        for seed, tokens in enumerate((16, 24, 7, 33, 2, 160)):
            compiled(seeded(seed, tokens, 16).requires_grad_()).sum().backward()
    assert counter.frame_count <= 2


@CONFIGS
def test_cached_data_are_inputs_of_the_graph(config) -> None:
    """Both layouts of the three weights, and no cast of a weight is left."""
    model = blocks(1, config)
    compiled = torch.compile(model, backend=(recorder := Recorder()), fullgraph=True)
    casts = []
    for around in (torch.enable_grad(), cached_weights(model)):
        with around:
            compiled(seeded(0, 8, 16).requires_grad_()).sum().backward()
        graph = recorder.graphs[-1]
        inputs = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        assert len([x for x in inputs if getattr(x, "dtype", None) == torch.float8_e4m3fn]) == (
            6 if casts else 0
        )
        casts.append(count_casts(graph))
    without, with_cache = casts
    # Row data in forward, column data in backward.
    assert without - with_cache == 2 * 3


def count_casts(graph: torch.fx.GraphModule) -> int:
    ops = torch.ops.float8
    return sum(
        node.target in (ops.cast.default, ops.cast_dynamic.default, ops.cast_delayed.default)
        for part in graph.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
    )
