"""Delayed scaling on ranks: the same layers everywhere, pipelines, evaluation under FSDP2."""

import copy
from pathlib import Path
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
    sync,
    sync_float8_amax_and_scale_history,
)
from float8.parallel.texts import all_gather_texts
from support.configs import delayed
from support.models import fp8_state, seeded
from support.ranks import Ranks
from support.sharded import batch, convert, model_of, shard
from support.stacks import stack, train

# ---------------------------------------------------------------- the same layers


def message_of(model: nn.Module) -> str:
    """What a sync says, on a rank that shares no more than the processes with the others."""
    try:
        sync_float8_amax_and_scale_history(model)
    except ValueError as error:
        return str(error)
    return ""


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


NAMED = {"number": "'0'", "names": "'2'", "order": "their order", "settings": "round_scales"}


@pytest.mark.parametrize("what", NAMED)
def test_different_layers_raise_on_every_rank_and_are_named(two: Ranks, what: str) -> None:
    for messages in two.run(different, what):
        for message in messages:
            assert "different layers with delayed scaling on the ranks" in message
            assert NAMED[what] in message


def subsets() -> None:
    """The comparison is made once per number of layers."""
    model = stack(3)
    with mock.patch.object(sync, "all_gather_texts", wraps=all_gather_texts) as compared:
        for step in range(3):
            train(model, step)
            sync_float8_amax_and_scale_history(model, [model[0], model[1]])
            sync_float8_amax_and_scale_history(model)
        assert compared.call_count == 2
        assert int((model[0].fp8_amax_history_input > 0).sum()) == 3


def test_layers_are_compared_once(two: Ranks) -> None:
    two.run(subsets)


def texts() -> None:
    """Over both dims of a mesh each rank knows those of all, the odd one's too."""
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    groups, device = [mesh.get_group(dim) for dim in range(2)], torch.device("cpu")
    with mock.patch.object(dist, "all_gather", side_effect=AssertionError):
        assert all_gather_texts("alike", groups, device) == {"alike"}
    mine = "é" * 70 if rank == 3 else "other"
    assert all_gather_texts(mine, groups, device) == {"é" * 70, "other"}


def test_texts_of_all_ranks_are_known_to_each(four: Ranks) -> None:
    four.run(texts)


# ---------------------------------------------------------------- compiled


def compiled_sync(sharded: bool) -> None:
    models = [stack(2), stack(2)]
    models[1].load_state_dict(models[0].state_dict())
    if sharded:
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


@pytest.mark.parametrize("sharded", [False, True])
def test_a_compiled_sync_is_that_of_eager_mode(two: Ranks, sharded: bool) -> None:
    two.run(compiled_sync, sharded)


# ---------------------------------------------------------------- a group


def of_one_rank() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = stack(1 + rank)  # not the same, nor need it be
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attach_to_optimizer(model, optimizer, group=groups[rank])
    x = (1.0 + rank) * seeded(0, 4, 16)
    model(x).sum().backward()
    optimizer.step()
    assert model[0].fp8_amax_history_input[0] == x.abs().max()


def test_attach_to_optimizer_takes_a_group(two: Ranks) -> None:
    two.run(of_one_rank)


# ---------------------------------------------------------------- pipelines


def garbage(*args, **kwargs):
    like = _TO_TENSOR(*args, **kwargs)
    return torch.full_like(like, 1e4, requires_grad=like.requires_grad)


_TO_TENSOR = getattr(PipelineStage, "_to_tensor", None)
needs_seam = pytest.mark.skipif(_TO_TENSOR is None, reason="this torch makes it elsewhere")


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


@needs_seam
def test_histories_of_a_pipeline_are_of_its_microbatches_alone(two: Ranks) -> None:
    assert two.run(staged, True) == [True, True]


@needs_seam
def test_without_forgetting_they_know_memory_that_nobody_wrote(two: Ranks) -> None:
    assert False in two.run(staged, False)


def told_shapes(folder: str, steps: range) -> dict[str, torch.Tensor]:
    """The state of a stage after `steps`; before step 2 it is saved, or loaded if that is first."""
    rank, module = dist.get_rank(), stack(2)
    for index, parameter in enumerate(module.parameters()):
        parameter.data.copy_(seeded(10 * rank + index, *parameter.shape) / 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    attach_to_optimizer(module, optimizer, group=[dist.new_group([0]), dist.new_group([1])][rank])
    like = torch.zeros(4, 16, requires_grad=rank > 0)
    output = torch.zeros(4, 16, requires_grad=True)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), like, output)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
    path = Path(folder) / f"{rank}.pt"
    if steps.start == 2:
        states = torch.load(path, weights_only=True)
        module.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    for step in steps:
        if step == 2 and steps.start == 0:
            torch.save([module.state_dict(), optimizer.state_dict()], path)
        optimizer.zero_grad()
        x = seeded(step, 8, 16)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=[])
        optimizer.step()
    return module.state_dict()


def test_a_pipeline_that_is_told_its_shapes_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    """It runs no stage on memory that nobody has written."""
    results = []
    for steps in (range(4), range(2, 4)):
        ranks = Ranks(2)
        try:
            results.append(ranks.run(told_shapes, str(tmp_path), steps))
        finally:
            ranks.stop()
    for whole, rest in zip(*results, strict=True):
        counts = {name: int((x > 0).sum()) for name, x in whole.items() if "history" in name}
        assert set(counts.values()) == {4}, counts
        assert all(torch.equal(x, rest[name]) for name, x in whole.items())


def pipelined(name: str, recipe: str) -> None:
    """Each stage is trained as in a model without a pipeline that accumulates microbatches."""
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


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_schedules_train_as_a_model_without_stages(two: Ranks, name: str, recipe: str) -> None:
    two.run(pipelined, name, recipe)


# ---------------------------------------------------------------- FSDP2


def evaluated(all_gather: bool) -> None:
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


@pytest.mark.parametrize("all_gather", [False, True])
def test_evaluation_is_that_of_dynamic_scaling(two: Ranks, all_gather: bool) -> None:
    two.run(evaluated, all_gather)


def accumulated(all_gather: bool) -> None:
    model = shard(convert(model_of(), "delayed", all_gather))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    attach_to_optimizer(model, optimizer)
    for step in range(3):
        for microbatch in range(3):
            model(batch(3 * step + microbatch, dist.get_rank(), torch.float32)).sum().backward()
        optimizer.step()
        if step == 1:
            model.load_state_dict(model.state_dict())
        optimizer.zero_grad()


@pytest.mark.parametrize("all_gather", [False, True])
def test_accumulation_under_fsdp_is_no_missing_sync(two: Ranks, all_gather: bool) -> None:
    two.run(accumulated, all_gather)
