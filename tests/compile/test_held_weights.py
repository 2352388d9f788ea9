"""Compiled code takes held weights as inputs of its graph: one graph, however many steps."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from float8 import attach_to_optimizer, convert_to_float8_training
from support.configs import of_recipe, tensorwise
from support.microbatches import HELD, ON_THE_FLY, with_weights
from support.models import Block, seeded
from support.training import Wrapped

NO_GIVING_UP = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)


class Recorder:
    """A backend that keeps the graphs."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.counter = CompileCounterWithBackend("aot_eager")

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return self.counter(graph, inputs)


def blocks(n: int, config, how: str = "plain") -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(*(Wrapped(Block(16, 32), how) for _ in range(n)))
    convert_to_float8_training(model, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach_to_optimizer(model, optimizer)
    return model, optimizer


@NO_GIVING_UP
@pytest.mark.parametrize(
    ("config", "how"),
    [
        (tensorwise(), "checkpoint"),
        (of_recipe("delayed"), "plain"),
        pytest.param(tensorwise(), "plain", marks=pytest.mark.exhaustive),
        pytest.param(of_recipe("delayed"), "checkpoint", marks=pytest.mark.exhaustive),
    ],
)
def test_one_graph_for_all_layers_and_steps(config, how: str) -> None:
    model, optimizer = blocks(3, with_weights(config), how)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    kept = []
    for seed in range(4):
        # What stays allocated makes sure that the next operands lie elsewhere.
        kept.append(torch.empty(16 * 32 * 2 * 12, dtype=torch.uint8))
        for microbatch in range(2):
            model(seeded(2 * seed + microbatch, 8, 16).requires_grad_()).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert counter.frame_count == 1
    if how == "plain":
        for tokens in (16, 24, 7):
            model(seeded(0, tokens, 16).requires_grad_()).sum().backward()
        assert counter.frame_count == 2


def test_held_data_are_inputs_of_the_graph() -> None:
    """Both layouts of the three weights, and no cast of a weight is left."""
    casts, inputs = {}, {}
    for weights in (HELD, ON_THE_FLY):
        torch._dynamo.reset()
        model, _ = blocks(1, with_weights(of_recipe("delayed"), weights))
        compiled = torch.compile(model, backend=(recorder := Recorder()), fullgraph=True)
        compiled(seeded(0, 8, 16).requires_grad_()).sum().backward()
        (graph,) = recorder.graphs
        given = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        inputs[weights] = sum(getattr(x, "dtype", None) == torch.float8_e4m3fn for x in given)
        casts[weights] = count_casts(graph)
    assert inputs == {HELD: 6, ON_THE_FLY: 0}
    # Row data in forward, column data in backward.
    assert casts[ON_THE_FLY] - casts[HELD] == 2 * 3


def count_casts(graph: torch.fx.GraphModule) -> int:
    ops = torch.ops.float8
    return sum(
        node.target in (ops.cast.default, ops.cast_delayed.default)
        for part in graph.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
    )
