"""DDP and FSDP1: their ranks scale as one process does that sees all the data."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from float8 import attach_to_optimizer, sync_float8_amax_and_scale_history
from support.configs import RECIPES
from support.models import Block, fp8_state
from support.ranks import Ranks, on
from support.sharded import batch, compiled, convert, here, model_of, small, train, train_alone


@pytest.mark.parametrize(("recipe", "all_gather"), [("tensorwise", True), ("delayed", False)])
@on("either")
def test_ddp_on_two_ranks_equals_one(recipe: str, all_gather: bool) -> None:
    model = convert(model_of(), recipe, all_gather)
    ddp = DistributedDataParallel(model)
    alone = convert(model_of(), recipe, all_gather=False)
    # On GPUs `foreach`, which rounds otherwise, is the default for plain weights only.
    run = train(ddp, 5, foreach=False)
    for grads in run.grads:
        for name in list(grads):
            grads[name.removeprefix("module.")] = grads.pop(name)
    run.assert_equal(train_alone(alone, 5, foreach=False))


@on("either")
def test_ddp_compiled_is_as_eager() -> None:
    eager, *others = (
        compiled(small("delayed", False), what, DistributedDataParallel, 3)[0]
        for what in ("nothing", "blocks", "whole model")
    )
    for run in others:
        run.assert_equal(eager)


@pytest.mark.parametrize("wrapped", ["model", "part"])
@on("two")
def test_amaxes_of_all_ranks_and_microbatches_count(wrapped: str) -> None:
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


def uneven_inputs(recipe: str, stop_all: bool) -> int:
    ddp = DistributedDataParallel(convert(model_of(blocks=1), recipe, all_gather=False))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attach_to_optimizer(ddp, optimizer)
    steps, rank = 0, dist.get_rank()
    with ddp.join(throw_on_early_termination=stop_all):
        for step in range(2 + rank):
            ddp(batch(step, rank, torch.float32)).square().mean().backward()
            optimizer.step()
            steps += 1
    return steps


def refused(stop_all: bool, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        uneven_inputs("delayed", stop_all)


def test_ranks_may_run_out_of_inputs_without_delayed_scaling(two: Ranks) -> None:
    assert two.run(uneven_inputs, "tensorwise", False) == [2, 3]
    two.run(refused, False, r"a sync of delayed scaling within DDP's join\(\)")
    two.run(refused, True, "exhausted")


def wrap(model: nn.Module) -> nn.Module:
    """Each block, then the whole."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block, nn.Sequential}),
        use_orig_params=True,
        device_id=here(),
    )


@pytest.mark.parametrize("recipe", RECIPES)
@on("either")
def test_two_ranks_equal_one(recipe: str) -> None:
    model = convert(model_of(), recipe, all_gather=False)
    alone = convert(model_of(), recipe, all_gather=False)
    losses = train(wrap(model), 4).losses, train_alone(alone, 4).losses
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))
    state = {n.replace("_fsdp_wrapped_module.", ""): v for n, v in fp8_state(model).items()}
    assert state.keys() == fp8_state(alone).keys()
    for name, value in fp8_state(alone).items():
        assert torch.equal(state[name], value), name


@on("two")
def test_it_cannot_gather_in_float8_and_says_so() -> None:
    model = convert(model_of(blocks=1), "tensorwise")
    with pytest.raises(RuntimeError, match=r"FSDP1(.)*enable_fsdp_float8_all_gather=False"):
        train(wrap(model), 1)


@on("either")
def test_compiled_is_as_eager() -> None:
    eager, *_ = compiled(small("delayed", False), "nothing", wrap, 4)
    _, plain_breaks, _ = compiled(small(None, False), "whole model", wrap, 1)
    for what in ("blocks", "whole model"):
        run, breaks, graphs = compiled(small("delayed", False), what, wrap, 4)
        run.assert_equal(eager)
        if what == "blocks":
            assert breaks == []
            assert graphs == 2  # none compiled again
        else:  # breaks where FSDP1 gathers, float8 or not
            assert set(breaks) <= set(plain_breaks)
            assert graphs >= 2
