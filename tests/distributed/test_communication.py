"""What FSDP2 with float8 all-gather sends: half the bytes, and one all-reduce for all scales."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from float8 import precompute_float8_dynamic_scale_for_fsdp, sync_float8_amax_and_scale_history
from support.ranks import Ranks, on
from support.sharded import Traffic, batch, convert, mesh_of, model_of, shard, train, whole

BF16 = torch.bfloat16


def step(model: nn.Module, number: int = 0) -> Tensor:
    x = batch(number, dist.get_rank(), next(model.parameters()).dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "ffn" in name]


@on("either")
def test_half_the_bytes_of_16_bit_weights_are_gathered() -> None:
    model = model_of(dtype=BF16)
    rest = sum(p.numel() for name, p in model.named_parameters() if "ffn" not in name)
    linear = sum(p.numel() for p in weights(model))
    for all_gather in (False, True):
        model = shard(convert(model_of(dtype=BF16), "tensorwise", all_gather))
        step(model)
        with Traffic() as seen:
            step(model)
        assert seen.gather_dtypes == {torch.uint8 if all_gather else BF16}
        size = 1 if all_gather else 2
        # Forward and backward gather each block once; the weights of this model divide evenly.
        assert sum(seen.sizes) == 2 * (2 * rest + size * linear) // dist.get_world_size()


@on("either")
def test_precomputing_is_one_all_reduce_and_leaves_none_to_the_forward() -> None:
    model = shard(convert(model_of(41), "tensorwise"), param_dtype=BF16)
    count = len(weights(model))
    with Traffic() as seen:
        step(model)
    assert seen.all_reduces == 2 * count  # in forward and in backward
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    with Traffic() as seen:
        precompute_float8_dynamic_scale_for_fsdp(model)
    assert seen.all_reduces == 1
    with Traffic() as seen:
        step(model)
    assert seen.all_reduces == 0
    optimizer.step()  # without telling
    with Traffic() as seen:
        step(model)
    assert seen.all_reduces == 2 * count
    with Traffic() as seen:  # harmless where nothing is dynamic or sharded
        precompute_float8_dynamic_scale_for_fsdp(convert(model_of(), "tensorwise"))
        precompute_float8_dynamic_scale_for_fsdp(shard(convert(model_of(), "delayed")))
        precompute_float8_dynamic_scale_for_fsdp(shard(model_of()))
    assert seen.all_reduces == 0


@on("four")
def test_a_sync_is_one_all_reduce() -> None:
    for mesh, all_reduces in ((mesh_of(), 1), (mesh_of(2, 2), 1)):
        model = shard(convert(model_of(), "delayed"), mesh)
        for _ in range(2):
            step(model)
            sync_float8_amax_and_scale_history(model)
        with Traffic() as seen:  # scales are known now
            step(model)
        assert seen.all_reduces == (0 if mesh.ndim == 1 else 2)  # the gradients of two blocks
        with Traffic() as seen:
            sync_float8_amax_and_scale_history(model)
        assert seen.all_reduces == all_reduces
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    alone = convert(model_of(), "delayed")
    step(alone)
    mine = alone[0].ffn.w1.fp8_amax_input.clone()
    sync_float8_amax_and_scale_history(alone, group=group)
    assert torch.equal(alone[0].ffn.w1.fp8_amax_history_input[0], mine)


def stage_of(mesh: DeviceMesh, all_gather: bool) -> nn.Module:
    """After a step: the first of a pipeline has one block, the second two."""
    model = convert(model_of(blocks=1 + mesh.get_local_rank("stage")), "delayed", all_gather)
    model.gain = nn.Parameter(torch.ones(2))
    shard(model, mesh["shard"])
    step(model)
    return model


def require_synced(model: nn.Module, mesh: DeviceMesh, **group: dist.ProcessGroup) -> None:
    """Each stage shares its amaxes with the ranks of its shards, and no others."""
    amax = model[0].ffn.w1.fp8_amax_input.clone()
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group("shard"))
    sync_float8_amax_and_scale_history(model, **group)
    assert torch.equal(model[0].ffn.w1.fp8_amax_history_input[0], amax)


@on("four")
def test_a_sync_is_among_the_ranks_of_the_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    model = stage_of(mesh, True)
    require_synced(model, mesh)
    step(model)
    for module in (model, *model.children()):
        module.unshard()
    with pytest.raises(ValueError, match=r"got weights that are gathered(.)*reshard(.)*`group=`"):
        sync_float8_amax_and_scale_history(model)
    require_synced(model, mesh, group=mesh.get_group("shard"))
    for module in (model, *model.children()):
        module.reshard()
    other = shard(convert(model_of(blocks=1), "delayed"), mesh_of())
    with pytest.raises(ValueError, match=r"got layers on 2 different meshes.*`group=`"):
        sync_float8_amax_and_scale_history(nn.ModuleList([model, other]))
    with pytest.raises(TypeError, match="group: got int, expected a ProcessGroup"):
        sync_float8_amax_and_scale_history(model, group=3)
    # In high precision, and gathered at the moment: other parameters tell the mesh.
    model = stage_of(mesh, False)
    for block in model:
        block.unshard()
    assert not any(hasattr(weight, "device_mesh") for weight in weights(model))
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
    with pytest.raises(ValueError, match=r"got weights that are gathered(.)*`group=`"):
        sync_float8_amax_and_scale_history(model)


def tripled(model: nn.Module) -> dict[str, Tensor]:
    return {name: 3 * value for name, value in model.state_dict().items()}


def write_views(model: nn.Module, early: dict[str, Tensor]) -> None:
    for weight in weights(model):
        weight.to_local()[:1].mul_(3)


def write_data(model: nn.Module, early: dict[str, Tensor]) -> None:
    for weight in weights(model):
        weight.data.mul_(3)


def write_early(model: nn.Module, early: dict[str, Tensor]) -> None:
    for value in early.values():
        value.detach().mul_(3)


def write_state(model: nn.Module, early: dict[str, Tensor]) -> None:
    for value in model.state_dict().values():
        value.to_local()[:1].mul_(3)


WRITES: list[Callable[[nn.Module, dict[str, Tensor]], object]] = [
    lambda model, early: torch._foreach_mul_(weights(model), 3),
    lambda model, early: model.load_state_dict(tripled(model)),
    lambda model, early: model.load_state_dict(tripled(model), assign=True),
    write_views,
    write_data,
    write_early,
    write_state,
]
"""Without an optimizer; `early` is a state dict from before."""


@pytest.mark.parametrize("hidden", [pytest.param(3, marks=pytest.mark.exhaustive), 42])
@on("four")
def test_a_stale_precomputed_scale_is_never_used(hidden: int) -> None:
    """Shards of 42 rows: 11, 11, 11, 9. Of 3 rows one rank has none."""
    for number, write in enumerate(WRITES):
        results = []
        for precompute in (True, False):
            model = shard(convert(model_of(hidden, blocks=1), "tensorwise"))
            model(batch(0, dist.get_rank(), torch.float32))  # FSDP2 may move shards
            early = model.state_dict()
            step(model)
            if precompute:
                precompute_float8_dynamic_scale_for_fsdp(model)
            with torch.no_grad():
                write(model, early)
            model.zero_grad()
            with Traffic() as seen:
                results.append([step(model), *(whole(p.grad) for p in weights(model))])
            assert torch.uint8 in seen.gather_dtypes, number
            if precompute:  # a write moves the shards of some ranks, maybe, and all must agree
                precompute_float8_dynamic_scale_for_fsdp(model)
            results[-1].append(step(model))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), number


def loaded_between() -> None:
    """Loading makes FSDP2 pad, and so move, uneven shards again."""
    for assign in (False, True):
        model = shard(convert(model_of(42), "tensorwise"))
        step(model)
        precompute_float8_dynamic_scale_for_fsdp(model)
        model.float()
        step(model)
        model.load_state_dict({n: 3 * v for n, v in model.state_dict().items()}, assign=assign)
        precompute_float8_dynamic_scale_for_fsdp(model)
        with Traffic() as seen:
            precomputed = step(model)
        assert seen.all_reduces == 0
        reference = shard(convert(model_of(42), "tensorwise"))
        reference.load_state_dict(model.state_dict())
        assert torch.equal(step(reference), precomputed)


def few_rows() -> None:
    """Whether an empty shard was written cannot be seen, so its weight is not precomputed."""
    model = shard(convert(nn.Sequential(nn.Linear(8, 5, bias=False)), "tensorwise"))  # 2, 2, 1, 0
    precompute_float8_dynamic_scale_for_fsdp(model)
    with Traffic() as seen:
        model(torch.ones(4, 8))
    assert seen.all_reduces == 1


def before_the_first_forward() -> None:
    """FSDP2 moves the shards of some ranks then; all must agree that no scale is known yet."""
    results = []
    for precompute in (True, False):
        model = shard(convert(model_of(42), "tensorwise"))
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        with Traffic() as seen:
            results.append([step(model), *(whole(p.grad) for p in weights(model))])
        assert seen.all_reduces > 0
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_when_scales_can_be_precomputed(four: Ranks) -> None:
    four.run(loaded_between)
    four.run(few_rows)
    four.run(before_the_first_forward)


@on("two")
def test_precomputing_while_weights_are_gathered_raises() -> None:
    model = shard(convert(model_of(), "tensorwise"))
    model.unshard()
    with pytest.raises(TypeError, match=r"model: got int, expected an nn.Module"):
        precompute_float8_dynamic_scale_for_fsdp(3)
    model[0].unshard()
    with pytest.raises(ValueError, match=r"'0.ffn.w1': got a weight that is gathered(.)*reshard"):
        precompute_float8_dynamic_scale_for_fsdp(model)


@pytest.mark.parametrize(
    ("recipe", "precompute"), [("tensorwise", True), ("tensorwise", False), ("delayed", False)]
)
@on("either")
def test_nan_on_one_rank_shows_on_all(recipe: str, precompute: bool) -> None:
    for where in ("weight", "input"):
        model = shard(convert(model_of(), recipe))
        train(model, 2)
        x = batch(0, dist.get_rank(), torch.float32)
        if dist.get_rank() == 1 and where == "input":
            x[0, 0] = -torch.nan
        if where == "weight":
            weight = model[0].ffn.w1.weight
            with torch.no_grad():
                local = weight.to_local()
                local[0, 0] = -torch.nan if dist.get_rank() == 1 else local[0, 0]
            if precompute:
                precompute_float8_dynamic_scale_for_fsdp(model)
        loss = model(x).square().mean()
        loss.backward()
        assert where == "input" or loss.isnan()
        for name, parameter in model.named_parameters():
            assert not whole(parameter.grad).isfinite().all(), name
        sync_float8_amax_and_scale_history(model)
        for name, buffer in model.named_buffers():
            assert buffer.isfinite().all(), name  # one bad step does not spoil the next


class ReducedError(Exception):
    """On which device."""


@on("two")
def test_offloaded_amaxes_are_reduced_on_the_device_of_the_mesh() -> None:
    """A mesh of another type of device than the weights and amaxes are on, as with offloading."""

    def reduce(x: Tensor, *_: object, **__: object) -> None:
        raise ReducedError(x.device.type)

    models = {recipe: shard(convert(model_of(), recipe)) for recipe in ("tensorwise", "delayed")}
    for model in models.values():
        step(model)
    with (
        mock.patch.object(DeviceMesh, "device_type", "meta"),
        mock.patch.object(dist, "all_reduce", reduce),
        mock.patch.object(torch.ops._c10d_functional, "all_reduce", reduce),
    ):
        with pytest.raises(ReducedError, match="meta"):
            precompute_float8_dynamic_scale_for_fsdp(models["tensorwise"])
        with pytest.raises(ReducedError, match="meta"):
            sync_float8_amax_and_scale_history(models["delayed"])
