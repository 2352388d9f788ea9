"""Compiled code takes held weights as inputs of its graph: one graph, however many steps."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from float8 import attach_to_optimizer, convert_to_float8_training
from support.configs import of_recipe, tensorwise
from support.microbatches import with_weights
from support.models import Block, seeded
from support.training import Wrapped

NO_GIVING_UP = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)


def blocks(n: int, config, how: str = "plain") -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(*(Wrapped(Block(16, 32), how) for _ in range(n)))
    convert_to_float8_training(model, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach_to_optimizer(model, optimizer)
    return model, optimizer


@NO_GIVING_UP
@pytest.mark.parametrize(
    ("config", "how"), [(tensorwise(), "checkpoint"), (of_recipe("delayed"), "plain")]
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
