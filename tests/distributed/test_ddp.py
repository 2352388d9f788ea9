"""DistributedDataParallel: its ranks scale as one process does that sees all the data."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from float8 import sync_float8_amax_and_scale_history
from support.configs import RECIPES
from support.models import fp8_state
from support.ranks import Ranks
from support.sharded import batch, convert, model_of, train, train_alone


def same_as_alone(recipe: str) -> None:
    model = convert(model_of(), recipe, all_gather=False)
    ddp = DistributedDataParallel(model)
    alone = convert(model_of(), recipe, all_gather=False)
    run = train(ddp)
    for grads in run.grads:
        for name in list(grads):
            grads[name.removeprefix("module.")] = grads.pop(name)
    run.assert_equal(train_alone(alone))
    states = fp8_state(model), fp8_state(alone)
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_equal_one(two: Ranks, recipe: str) -> None:
    two.run(same_as_alone, recipe)


def amaxes_survive(wrapped: str) -> None:
    model = convert(model_of(blocks=1), "delayed", all_gather=False)
    alone = convert(model_of(blocks=1), "delayed", all_gather=False)
    ddp = DistributedDataParallel(model if wrapped == "model" else model[0])
    rank = dist.get_rank()
    for microbatch in range(3):  # DDP copies rank 0's buffers at each forward
        ddp(batch(microbatch, rank, torch.float32)).square().mean().backward()
        for each in range(2):
            alone(batch(microbatch, each, torch.float32)).square().mean().backward()
    for part in (model, alone):
        sync_float8_amax_and_scale_history(part)
    states = fp8_state(model), fp8_state(alone)
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


@pytest.mark.parametrize("wrapped", ["model", "part"])
def test_amaxes_of_all_ranks_and_microbatches_count(two: Ranks, wrapped: str) -> None:
    two.run(amaxes_survive, wrapped)
