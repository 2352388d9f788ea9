"""DDP and FSDP1: their ranks scale as one process does that sees all the data."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from float8 import sync_float8_amax_and_scale_history
from support.configs import RECIPES
from support.models import fp8_state
from support.ranks import Ranks
from support.sharded import batch, convert, model_of, train, train_alone


def same_as_alone(recipe: str, all_gather: bool) -> None:
    model = convert(model_of(), recipe, all_gather)
    ddp = DistributedDataParallel(model)
    alone = convert(model_of(), recipe, all_gather=False)
    run = train(ddp, 5)
    for grads in run.grads:
        for name in list(grads):
            grads[name.removeprefix("module.")] = grads.pop(name)
    run.assert_equal(train_alone(alone, 5))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("all_gather", [False, True])
def test_ddp_on_two_ranks_equals_one(two: Ranks, recipe: str, all_gather: bool) -> None:
    two.run(same_as_alone, recipe, all_gather)


def compiled_as_eager() -> None:
    torch._dynamo.reset()
    runs = []
    for backend in ("eager", "aot_eager"):
        ddp = DistributedDataParallel(convert(model_of(blocks=1), "delayed", all_gather=False))
        forward = ddp if backend == "eager" else torch.compile(ddp, backend=backend)
        runs.append(train(ddp, 3, forward=forward))
    runs[0].assert_equal(runs[1])


def test_ddp_compiled_is_as_eager(two: Ranks) -> None:
    two.run(compiled_as_eager)


def fsdp1(recipe: str) -> None:
    model = convert(model_of(), recipe, all_gather=False)
    sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    alone = convert(model_of(), recipe, all_gather=False)
    losses = train(sharded, 4).losses, train_alone(alone, 4).losses
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))
    states = fp8_state(model), fp8_state(alone)
    for name in states[1]:
        assert torch.equal(states[0][name.replace("_fsdp_wrapped_module.", "")], states[1][name])


def fsdp1_with_all_gather() -> None:
    model = convert(model_of(blocks=1), "tensorwise")
    with pytest.raises(ValueError, match=r"FSDP1(.)*enable_fsdp_float8_all_gather=False"):
        train(
            FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")), 1
        )


def test_fsdp1_cannot_gather_in_float8_and_says_so(two: Ranks) -> None:
    two.run(fsdp1_with_all_gather)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fsdp1_on_two_ranks_equals_one(two: Ranks, recipe: str) -> None:
    two.run(fsdp1, recipe)


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
