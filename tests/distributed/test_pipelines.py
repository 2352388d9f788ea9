"""Delayed scaling and other recipes in the stages of a pipeline."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from float8 import attach_to_optimizer, forget_float8_amax, sync_float8_amax_and_scale_history
from support.models import fp8_state, seeded
from support.outcome import assert_same
from support.parallel import alone
from support.ranks import Ranks, on
from support.sharded import convert
from support.stacks import stack


def garbage(*args: Any, **kwargs: Any) -> Tensor:
    like = _TO_TENSOR(*args, **kwargs)
    return torch.full_like(like, 1e4, requires_grad=like.requires_grad)


_TO_TENSOR = getattr(PipelineStage, "_to_tensor", None)


def run(schedule: Any, x: Tensor, target: Tensor) -> None:
    """One step of the two stages, or of those of this rank."""
    if dist.get_rank() == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=[])


def staged(forget: bool) -> bool:
    """Whether the histories of a stage are those of the same microbatches without a pipeline."""
    rank, group = dist.get_rank(), alone()
    single = nn.ModuleList(stack(2) for _ in range(2))
    for index, layer in enumerate(layer for part in single for layer in part):
        with torch.no_grad():
            layer.weight.copy_(seeded(index, 16, 16))
    module = stack(2)
    module.load_state_dict(single[rank].state_dict())
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.square().sum())
    for step in range(3):
        x = seeded(step, 8, 16)
        with mock.patch.object(PipelineStage, "_to_tensor", garbage):  # as memory nobody wrote
            run(schedule, x, torch.zeros(8, 16))
        if step > 0:
            for part in x.chunk(2):
                single[1](single[0](part)).square().sum().backward()
        elif forget:
            forget_float8_amax(module)
        for part in (module, *single):
            sync_float8_amax_and_scale_history(part, group=group)
    mine, wanted = fp8_state(module), fp8_state(single[rank])
    return all(torch.equal(mine[name], wanted[name]) for name in mine)


@pytest.mark.skipif(_TO_TENSOR is None, reason="this torch makes it elsewhere")
def test_histories_of_a_pipeline_are_of_its_microbatches_alone(two: Ranks) -> None:
    assert two.run(staged, True) == [True, True]
    assert False in two.run(staged, False)  # they know memory that nobody wrote


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("ScheduleGPipe", "delayed recipe"),
        ("Schedule1F1B", "rowwise"),
        ("ScheduleInterleaved1F1B", "tensorwise"),
        ("ScheduleInterleaved1F1B", "delayed recipe"),
    ],
)
@on("two")
def test_schedules_train_as_a_model_without_stages(name: str, recipe: str) -> None:
    rank, schedule_class, group = dist.get_rank(), getattr(pipelining, name), alone()
    stages = 4 if issubclass(schedule_class, PipelineScheduleMulti) else 2
    torch.manual_seed(0)
    single = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(stages)))
    convert(single, recipe, False)
    mine = {index: copy.deepcopy(single[index]) for index in range(rank, stages, 2)}
    like = torch.zeros(4, 16, requires_grad=True)
    made = [
        PipelineStage(part, index, stages, torch.device("cpu"), like, like)
        for index, part in mine.items()
    ]

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean()

    schedule = schedule_class(made if stages == 4 else made[0], 4, loss_fn=loss_fn)
    models = nn.ModuleList(mine.values()), single
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        attach_to_optimizer(model, optimizer, group=group)
    for step in range(3):
        x, target = seeded(step, 16, 16), seeded(10 + step, 16, 16)
        run(schedule, x, target)
        for part, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            loss_fn(single(part), wanted).backward()
        for parameter in single.parameters():
            parameter.grad /= 4  # as a schedule does
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for index, part in mine.items():
            assert_same(part.state_dict(), single[index].state_dict(), (step, index))
