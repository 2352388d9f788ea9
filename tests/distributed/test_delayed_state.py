"""Delayed scaling on ranks: the same layers everywhere, pipelines, evaluation under FSDP2."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from float8 import (
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    forget_float8_amax,
    sync_float8_amax_and_scale_history,
)
from float8.parallel.groups import unlike
from support.configs import delayed
from support.models import fp8_state, seeded
from support.ranks import Ranks, on
from support.sharded import batch, convert, model_of, shard
from support.stacks import stack


def message_of(model: nn.Module) -> str:
    """What a sync says, on a rank that shares no more than the processes with the others."""
    with pytest.raises(ValueError, match="different layers with delayed scaling on the ranks") as e:
        sync_float8_amax_and_scale_history(model)
    return str(e.value)


def different(what: str) -> list[str]:
    odd = dist.get_rank() == 1
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    names, config = {"0", "1"}, delayed()
    if odd and what == "number":
        names = {"1"}
    elif odd and what == "names":
        names = {"0", "2"}
    elif odd and what == "order":
        model = nn.ModuleDict({"1": model[1], "0": model[0]})
    elif odd and what == "settings":
        config = delayed(round_scales_to_power_of_2=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)
    for layer in list(model.values()) if isinstance(model, nn.ModuleDict) else model:
        layer(seeded(0, 4, 16)).sum().backward()
    before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
    messages = [message_of(model), message_of(model)]
    assert all(torch.equal(buffer, before[name]) for name, buffer in fp8_state(model).items())
    return messages


NAMED = {
    "number": ("has 2,", "has 1,"),
    "names": ("'1'", "'2'"),
    "order": ("'0'", "'1'"),
    "settings": ("has 2,", "round_scales"),
}


def test_different_layers_raise_on_every_rank_and_are_named(two: Ranks) -> None:
    for what, named in NAMED.items():
        for messages, expected in zip(two.run(different, what), named, strict=True):
            assert all(expected in message for message in messages), what


@on("four")
def test_each_rank_knows_that_one_is_odd() -> None:
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    groups, device = [mesh.get_group(dim) for dim in range(2)], torch.device("cpu")
    assert unlike(["alike"], groups, device) is None
    for odd, of_odd, of_others in (
        (["alike"], [], ["b"]),
        (["alike", "é"], ["é"], ["b"]),
        (["alike", "b", "c"], ["c"], []),
    ):
        found = unlike(odd if rank == 3 else ["alike", "b"], groups, device)
        assert found == (of_odd if rank == 3 else of_others)


@on("two")
def test_a_compiled_sync_is_that_of_eager_mode() -> None:
    models = [stack(2), stack(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        fully_shard(model)
    compiled = torch.compile(sync_float8_amax_and_scale_history, backend="aot_eager")
    for step in range(3):
        for model, sync_it in zip(
            models, (sync_float8_amax_and_scale_history, compiled), strict=True
        ):
            model(seeded(2 * step + dist.get_rank(), 4, 16)).sum().backward()
            sync_it(model)
        wanted, got = map(fp8_state, models)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def garbage(*args, **kwargs):
    like = _TO_TENSOR(*args, **kwargs)
    return torch.full_like(like, 1e4, requires_grad=like.requires_grad)


_TO_TENSOR = getattr(PipelineStage, "_to_tensor", None)


def staged(forget: bool) -> bool:
    """Whether the histories of a stage are those of the same microbatches without a pipeline."""
    rank = dist.get_rank()
    alone = nn.ModuleList(stack(2) for _ in range(2))
    for index, layer in enumerate(layer for part in alone for layer in part):
        with torch.no_grad():
            layer.weight.copy_(seeded(index, 16, 16))
    module = stack(2)
    module.load_state_dict(alone[rank].state_dict())
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.square().sum())
    group = [dist.new_group([0]), dist.new_group([1])][rank]
    for step in range(3):
        x = seeded(step, 8, 16)
        with mock.patch.object(PipelineStage, "_to_tensor", garbage):  # as memory nobody wrote
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=torch.zeros(8, 16), losses=[])
        if step > 0:
            for part in x.chunk(2):
                alone[1](alone[0](part)).square().sum().backward()
        elif forget:
            forget_float8_amax(module)
        sync_float8_amax_and_scale_history(module, group=group)
        for part in alone:
            sync_float8_amax_and_scale_history(part, group=group)
    mine, wanted = fp8_state(module), fp8_state(alone[rank])
    return all(torch.equal(mine[name], wanted[name]) for name in mine)


@pytest.mark.skipif(_TO_TENSOR is None, reason="this torch makes it elsewhere")
def test_histories_of_a_pipeline_are_of_its_microbatches_alone(two: Ranks) -> None:
    assert two.run(staged, True) == [True, True]
    assert False in two.run(staged, False)  # they know memory that nobody wrote


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("ScheduleGPipe", "delayed"),
        ("Schedule1F1B", "rowwise"),
        ("ScheduleInterleaved1F1B", "tensorwise"),
        ("ScheduleInterleaved1F1B", "delayed"),
    ],
)
@on("two")
def test_schedules_train_as_a_model_without_stages(name: str, recipe: str) -> None:
    rank, schedule_class = dist.get_rank(), getattr(pipelining, name)
    stages = 4 if issubclass(schedule_class, PipelineScheduleMulti) else 2
    torch.manual_seed(0)
    alone = [nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(stages)]
    for part in alone:
        convert_to_float8_training(part, config=recipe, module_filter_fn=all_linears)
    mine = {index: copy.deepcopy(alone[index]) for index in range(rank, stages, 2)}
    groups = [dist.new_group([0]), dist.new_group([1])]
    like = torch.zeros(4, 16, requires_grad=True)
    made = [
        PipelineStage(part, index, stages, torch.device("cpu"), like, like)
        for index, part in mine.items()
    ]

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().mean()

    schedule = schedule_class(made if stages == 4 else made[0], 4, loss_fn=loss_fn)
    whole = nn.Sequential(*alone)
    ours, theirs = nn.ModuleList(mine.values()), torch.optim.SGD(whole.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    attach_to_optimizer(ours, optimizer, group=groups[rank])
    attach_to_optimizer(whole, theirs, group=groups[rank])
    for step in range(3):
        x, target = seeded(step, 16, 16), seeded(10 + step, 16, 16)
        optimizer.zero_grad()
        theirs.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=[])
        for part, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            loss_fn(whole(part), wanted).backward()
        for parameter in whole.parameters():
            parameter.grad /= 4  # as a schedule does
        optimizer.step()
        theirs.step()
        for index, part in mine.items():
            state = alone[index].state_dict()
            for key, y in part.state_dict().items():
                assert torch.equal(y, state[key]), (step, index, key)


@pytest.mark.parametrize("all_gather", [False, True])
@on("two")
def test_evaluation_is_that_of_dynamic_scaling(all_gather: bool) -> None:
    outputs = {}
    for recipe in ("delayed", "tensorwise"):
        model = shard(convert(model_of(), recipe, all_gather))
        for step in range(2):
            model(batch(step, dist.get_rank(), torch.float32)).square().mean().backward()
            sync_float8_amax_and_scale_history(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(20)  # far from what the histories know
            outputs[recipe] = model.eval()(batch(9, dist.get_rank(), torch.float32))
    assert torch.equal(outputs["delayed"], outputs["tensorwise"])
