"""A sync of delayed scaling: one all-reduce among the right ranks, of the amaxes of all.

And delayed scaling and other recipes in the stages of a pipeline.
"""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    attach_to_optimizer,
    convert_to_float8_training,
    forget_float8_amax,
    sync_float8_amax_and_scale_history,
)
from float8.ranks import unlike
from support.configs import delayed
from support.models import fp8_state, seeded
from support.outcome import assert_same, compiles
from support.parallel import alone
from support.ranks import Ranks, on
from support.sharded import batch, convert, mesh_of, model_of, shard
from support.spies import Traffic
from support.stacks import stack


def step(model: nn.Module, number: int = 0, rank: int | None = None) -> None:
    """Forward and backward of a batch of this rank's own."""
    x = batch(number, dist.get_rank() if rank is None else rank)
    model(x).square().mean().backward()


def sync_traffic(model: nn.Module, **group: Any) -> int:
    with Traffic() as seen:
        sync_float8_amax_and_scale_history(model, **group)
    return seen.all_reduces


@on("two_or_four")
def test_a_sync_is_one_all_reduce() -> None:
    for mesh in (mesh_of(), mesh_of(dist.get_world_size() // 2, 2)):
        model = shard(convert(model_of(blocks=1), "delayed"), mesh)
        for _ in range(2):
            step(model)
            sync_float8_amax_and_scale_history(model)
        with Traffic() as seen:  # scales are known now
            step(model)
        assert seen.all_reduces == (0 if mesh.ndim == 1 else 1)  # of the gradients
        assert sync_traffic(model) == 1
        before = {name: value.clone() for name, value in fp8_state(model).items()}
        assert sync_traffic(model) == 1  # of nothing
        assert_same(fp8_state(model), before)
    single = convert(model_of(), "delayed")
    step(single)
    mine = single[0].ffn.w1.fp8_amax_input.clone()
    sync_float8_amax_and_scale_history(single, group=alone())
    assert torch.equal(single[0].ffn.w1.fp8_amax_history_input[0], mine)


# ---------------------------------------------------------------- among which ranks


def stage_of(mesh: DeviceMesh, all_gather: bool) -> nn.Module:
    """After a step: the first of a pipeline has one block, the second two."""
    model = convert(model_of(blocks=1 + mesh.get_local_rank("stage")), "delayed", all_gather)
    model.gain = nn.Parameter(torch.ones(2))
    shard(model, mesh["shard"])
    step(model)
    return model


def require_synced(model: nn.Module, mesh: DeviceMesh, **group: Any) -> None:
    """Each stage shares its amaxes with the ranks of its shards, and no others."""
    amax = model[0].ffn.w1.fp8_amax_input.clone()
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group("shard"))
    sync_float8_amax_and_scale_history(model, **group)
    assert torch.equal(model[0].ffn.w1.fp8_amax_history_input[0], amax)


def require_refused(model: nn.Module, match: str, **group: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        sync_float8_amax_and_scale_history(model, **group)


@on("two_or_four")
def test_a_sync_is_among_the_ranks_of_the_mesh() -> None:
    shape = 2, dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("stage", "shard"))
    model = stage_of(mesh, True)
    require_synced(model, mesh)
    step(model)
    for module in (model, *model.children()):
        module.unshard()
    require_refused(model, r"got weights that are gathered(.)*reshard(.)*`group=`")
    require_synced(model, mesh, group=mesh.get_group("shard"))
    for module in (model, *model.children()):
        module.reshard()
    other = shard(convert(model_of(blocks=1), "delayed"), mesh_of())
    both = nn.ModuleList([model, other])
    require_refused(both, r"got layers on 2 different meshes.*`group=`")
    require_refused(model, "group: got int, expected a ProcessGroup", group=3)
    # In high precision, and gathered at the moment: other parameters tell the mesh.
    model = stage_of(mesh, False)
    for block in model:
        block.unshard()
    assert not hasattr(model[0].ffn.w1.weight, "device_mesh")
    require_synced(model, mesh)


@on("two")
def test_a_mesh_of_something_else_does_not_tell_the_ranks_of_a_sync() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tensor"))
    model = nn.Module()
    model.body = fully_shard(convert(model_of(), "delayed"), mesh=mesh["shard"])
    head = distribute_tensor(torch.ones(8, 8), mesh["tensor"], [Shard(0)])
    model.head = nn.ParameterList([nn.Parameter(head)])
    step(model.body)
    model.body.unshard()
    require_refused(model, r"got weights that are gathered(.)*`group=`")


# ---------------------------------------------------------------- of what counts


@on("two")
def test_amaxes_of_all_ranks_and_microbatches_count() -> None:
    """DDP, of the model or of a part, copies rank 0's buffers at each forward."""
    for name in ("", "0"):
        model, single = (convert(model_of(blocks=1), "delayed", False) for _ in "ab")
        ddp = DistributedDataParallel(model.get_submodule(name))
        for microbatch in range(3):
            step(ddp, microbatch)
            for rank in range(2):
                step(single, microbatch, rank)
        for part, group in ((model, None), (single, alone())):
            sync_float8_amax_and_scale_history(part, group=group)
        assert_same(fp8_state(model), fp8_state(single))


@on("two")
def test_a_shard_of_a_rank_that_does_not_run_the_layer_counts() -> None:
    runs = []
    for all_gather in (False, True):
        model = shard(convert(model_of(), "delayed", all_gather))
        with torch.no_grad():
            weight = model[1].ffn.w1.weight.to_local()
            weight.mul_(100 if dist.get_rank() else 1)
        for _ in range(2):
            for block in model:
                block.unshard()
            x = batch(0, dist.get_rank())
            for block in list(model)[: 1 if dist.get_rank() else None]:
                x = block.ffn(x)
            for block in model:
                block.reshard()
            sync_float8_amax_and_scale_history(model)
        runs.append(fp8_state(model))
    assert runs[0]["1.ffn.w1.fp8_scale_weight"] > 10 * runs[0]["1.ffn.w3.fp8_scale_weight"]
    assert_same(*runs)


@pytest.mark.parametrize("all_gather", [False, True])
@on("two")
def test_evaluation_is_that_of_dynamic_scaling(all_gather: bool) -> None:
    outputs = {}
    for recipe in ("delayed", "tensorwise"):
        model = shard(convert(model_of(blocks=1), recipe, all_gather))
        for number in range(2):
            step(model, number)
            sync_float8_amax_and_scale_history(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(20)  # far from what the histories know
            model.requires_grad_(not all_gather)  # else a gather does not know of `no_grad`
            x = 20 * batch(9, dist.get_rank())
            outputs[recipe] = torch.stack([model.train(mode)(x) for mode in (False, True)])
    assert torch.equal(outputs["delayed"], outputs["tensorwise"])


@pytest.mark.exhaustive
@on("two")
def test_a_compiled_sync_is_that_of_eager_mode() -> None:
    models = [stack(2), stack(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        fully_shard(model)
    compiled = sync_float8_amax_and_scale_history
    if compiles():
        compiled = torch.compile(compiled, backend="aot_eager")
    for number in range(3):  # scales are known from the third on
        for model, sync_it in zip(
            models, (sync_float8_amax_and_scale_history, compiled), strict=True
        ):
            model(seeded(2 * number + dist.get_rank(), 4, 16)).sum().backward()
            sync_it(model)
        assert_same(*map(fp8_state, models))


def uneven_inputs(recipe: str, stop_all: bool) -> int:
    ddp = DistributedDataParallel(convert(model_of(blocks=1), recipe, all_gather=False))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attach_to_optimizer(ddp, optimizer)
    steps = 0
    with ddp.join(throw_on_early_termination=stop_all):
        for number in range(2 + dist.get_rank()):
            step(ddp, number)
            optimizer.step()
            steps += 1
    return steps


@on("two")
def test_ranks_may_run_out_of_inputs_without_delayed_scaling() -> None:
    assert uneven_inputs("tensorwise", False) == 2 + dist.get_rank()
    with pytest.raises(RuntimeError, match="exhausted"):
        uneven_inputs("delayed", True)


# ---------------------------------------------------------------- of the same layers

ODD: dict[str, tuple[Any, ...]] = {
    "number": ({"1"}, {}, 1, "has 2,", "has 1,"),
    "names": ({"0", "2"}, {}, 1, "'1'", "'2'"),
    "order": ({"0", "1"}, {}, -1, "'0'", "'1'"),
    "settings": ({"0", "1"}, {"round_scales_to_power_of_2": True}, 1, "has 2,", "round_scales"),
}
"""Layers, settings and order of rank 1; what each of the two says."""


@on("two")
def test_different_layers_raise_on_every_rank_and_are_named() -> None:
    for names, settings, order, *says in ODD.values():
        if dist.get_rank() == 0:
            names, settings, order = {"0", "1"}, {}, 1
        model = nn.ModuleDict({name: nn.Linear(16, 16) for name in "012"[::order]})
        convert_to_float8_training(
            model,
            config=delayed(**settings),
            module_filter_fn=lambda _, name, names=names: name in names,
        )
        for layer in model.children():
            layer(seeded(0, 4, 16)).sum().backward()
        before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
        for _ in range(2):
            require_refused(model, f"different layers with delayed(.|\n)*{says[dist.get_rank()]}")
        assert_same(fp8_state(model), before)


@on("two_or_four")
def test_each_rank_knows_that_one_is_odd() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    mesh = init_device_mesh("cpu", (2, (last + 1) // 2))
    groups, device = [mesh.get_group(dim) for dim in range(2)], torch.device("cpu")
    assert unlike(["alike"], groups, device) is None
    for odd, of_odd, of_others in (
        (["alike"], [], ["b"]),
        (["alike", "é"], ["é"], ["b"]),
        (["alike", "b", "c"], ["c"], []),
    ):
        found = unlike(odd if rank == last else ["alike", "b"], groups, device)
        assert found == (of_odd if rank == last else of_others)


# ---------------------------------------------------------------- in the stages of a pipeline


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
        pytest.param("Schedule1F1B", "rowwise", marks=pytest.mark.exhaustive),
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
