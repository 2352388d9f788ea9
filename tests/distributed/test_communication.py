"""What FSDP2 with float8 all-gather sends: half the bytes, and one all-reduce for all scales."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from float8 import precompute_float8_dynamic_scale_for_fsdp, sync_float8_amax_and_scale_history
from float8.parallel.amax import all_reduce_amax
from support.ranks import Ranks
from support.sharded import batch, convert, here, mesh_of, model_of, shard, traffic, train, whole

BF16 = torch.bfloat16


def step(model: nn.Module, number: int = 0) -> torch.Tensor:
    x = batch(number, dist.get_rank(), next(model.parameters()).dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "ffn" in name]


def bytes_are_halved() -> None:
    gathered, dtypes = [], []
    for all_gather in (False, True):
        layer = nn.Linear(64, 64, bias=False, device=here())
        model = shard(convert(nn.Sequential(layer), "tensorwise", all_gather))
        with traffic() as seen:
            model(torch.ones(4, 64, device=here())).sum().backward()
        gathered.append(sum(seen.sizes))
        dtypes.append(seen.gather_dtypes)
    model = model_of(dtype=BF16)
    rest = sum(p.numel() for name, p in model.named_parameters() if "ffn" not in name)
    linear = sum(p.numel() for name, p in model.named_parameters() if "ffn" in name)
    assert gathered[0] == 4 * gathered[1]  # float32 here
    assert dtypes == [{torch.float32}, {torch.uint8}]

    for all_gather in (False, True):
        model = shard(convert(model_of(dtype=BF16), "tensorwise", all_gather))
        step(model)
        with traffic() as seen:
            step(model)
        size = 1 if all_gather else 2
        # Forward and backward gather each block once; the weights of this model divide evenly.
        assert sum(seen.sizes) == 2 * (2 * rest + size * linear) // dist.get_world_size()


def test_half_the_bytes_of_16_bit_weights_are_gathered(either: Ranks) -> None:
    either.run(bytes_are_halved)


def one_all_reduce() -> None:
    model = shard(convert(model_of(41), "tensorwise"), param_dtype=BF16)
    count = len(weights(model))
    with traffic() as seen:
        step(model)
    assert seen.all_reduces == 2 * count  # in forward and in backward
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    with traffic() as seen:
        precompute_float8_dynamic_scale_for_fsdp(model)
    assert seen.all_reduces == 1
    with traffic() as seen:
        step(model)
    assert seen.all_reduces == 0
    optimizer.step()  # without telling
    with traffic() as seen:
        step(model)
    assert seen.all_reduces == 2 * count
    with traffic() as seen:  # harmless where nothing is dynamic or sharded
        precompute_float8_dynamic_scale_for_fsdp(convert(model_of(), "tensorwise"))
        precompute_float8_dynamic_scale_for_fsdp(shard(convert(model_of(), "delayed")))
        precompute_float8_dynamic_scale_for_fsdp(shard(model_of()))
    assert seen.all_reduces == 0


def test_precomputing_is_one_all_reduce_and_leaves_none_to_the_forward(either: Ranks) -> None:
    either.run(one_all_reduce)


def sync_is_one_all_reduce() -> None:
    for mesh, all_reduces in ((mesh_of(), 1), (mesh_of(2, 2), 1)):
        model = shard(convert(model_of(), "delayed"), mesh)
        for _ in range(2):
            step(model)
            sync_float8_amax_and_scale_history(model)
        with traffic() as seen:  # scales are known now
            step(model)
        assert seen.all_reduces == (0 if mesh.ndim == 1 else 2)  # the gradients of two blocks
        with traffic() as seen:
            sync_float8_amax_and_scale_history(model)
        assert seen.all_reduces == all_reduces
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    alone = convert(model_of(), "delayed")
    step(alone)
    mine = alone[0].ffn.w1.fp8_amax_input.clone()
    sync_float8_amax_and_scale_history(alone, group=group)
    assert torch.equal(alone[0].ffn.w1.fp8_amax_history_input[0], mine)


def test_a_sync_is_one_all_reduce(four: Ranks) -> None:
    four.run(sync_is_one_all_reduce)


def stages() -> None:
    """Two stages of a pipeline with different layers, each sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage, rank = mesh.get_local_rank("stage"), mesh.get_local_rank("shard")
    model = shard(convert(model_of(blocks=1 + stage), "delayed"), mesh["shard"])
    step(model)
    amax = model[0].ffn.w1.fp8_amax_input.clone()
    parts = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(parts, amax, group=mesh.get_group("shard"))
    sync_float8_amax_and_scale_history(model)
    assert torch.equal(model[0].ffn.w1.fp8_amax_history_input[0], torch.stack(parts).max())
    assert torch.equal(parts[rank], amax)
    for module in (model, *model.children()):
        module.unshard()
    with pytest.raises(ValueError, match=r"got weights that are gathered(.)*reshard(.)*`group=`"):
        sync_float8_amax_and_scale_history(model)
    sync_float8_amax_and_scale_history(model, group=mesh.get_group("shard"))
    for module in (model, *model.children()):
        module.reshard()
    other = shard(convert(model_of(blocks=1), "delayed"), mesh_of())
    both = nn.ModuleList([model, other])
    with pytest.raises(ValueError, match=r"got layers on 2 different meshes.*`group=`"):
        sync_float8_amax_and_scale_history(both)
    with pytest.raises(TypeError, match="group: got int, expected a ProcessGroup"):
        sync_float8_amax_and_scale_history(model, group=3)


def gathered_stages() -> None:
    """The same with weights in high precision, gathered at the moment: others tell the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage = mesh.get_local_rank("stage")
    model = convert(model_of(blocks=1 + stage), "delayed", all_gather=False)
    model.gain = nn.Parameter(torch.ones(2))
    shard(model, mesh["shard"])
    step(model)
    for block in model:
        block.unshard()
    assert not any(hasattr(weight, "device_mesh") for weight in weights(model))
    parts = [torch.zeros(()) for _ in range(2)]
    amax = model[0].ffn.w1.fp8_amax_input.clone()
    dist.all_gather(parts, amax, group=mesh.get_group("shard"))
    sync_float8_amax_and_scale_history(model)
    assert torch.equal(model[0].ffn.w1.fp8_amax_history_input[0], torch.stack(parts).max())


def test_a_sync_of_gathered_weights_is_among_the_ranks_of_the_mesh(four: Ranks) -> None:
    four.run(gathered_stages)


def gathered_beside_another_mesh() -> None:
    """A head on a mesh of one rank does not tell which ranks the gathered layers are on."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tensor"))
    model = nn.Module()
    model.body = fully_shard(convert(model_of(), "delayed"), mesh=mesh["shard"])
    head = distribute_tensor(torch.ones(8, 8), mesh["tensor"], [Shard(0)])
    model.head = nn.ParameterList([nn.Parameter(head)])
    step(model.body)
    model.body.unshard()
    with pytest.raises(ValueError, match=r"got weights that are gathered(.)*`group=`"):
        sync_float8_amax_and_scale_history(model)


def test_a_mesh_of_something_else_does_not_tell_the_ranks_of_a_sync(two: Ranks) -> None:
    two.run(gathered_beside_another_mesh)


def test_a_sync_is_among_the_ranks_of_the_mesh(four: Ranks) -> None:
    four.run(stages)


def write_whole(model: nn.Module, early: dict[str, torch.Tensor], how: str) -> None:
    """Change all weights without an optimizer; `early` is a state dict from before."""
    linears, state = weights(model), model.state_dict()
    with torch.no_grad():
        match how:
            case "in place":
                for weight in linears:
                    weight.mul_(3)
            case "foreach":
                torch._foreach_mul_(linears, 3)
            case "data":
                for weight in linears:
                    weight.data.mul_(3)
            case "a view":
                for weight in linears:
                    weight.to_local()[:1].mul_(3)
            case "copy":
                for weight in linears:
                    weight.copy_(weight * 3)
            case "init":
                for weight in linears:
                    nn.init.constant_(weight, 3.0)
            case "state dict":
                for value in state.values():
                    value.mul_(3)
            case "earlier state dict":
                for value in early.values():
                    value.detach().mul_(3)
            case "shards in a state dict":
                for value in state.values():
                    value.to_local()[:1].mul_(3)
            case "load":
                state = {name: 3 * value for name, value in model.state_dict().items()}
                model.load_state_dict(state)
            case "assign":
                state = {name: 3 * value for name, value in model.state_dict().items()}
                model.load_state_dict(state, assign=True)


HOWS = ["in place", "foreach", "data", "a view", "copy", "init", "load", "assign"]
HOWS += ["state dict", "earlier state dict", "shards in a state dict"]


def stale_scales(hidden: int) -> None:
    for how in HOWS:
        results = []
        for precompute in (True, False):
            model = shard(convert(model_of(hidden, blocks=1), "tensorwise"))
            model(batch(0, dist.get_rank(), torch.float32))  # FSDP2 may move shards
            early = model.state_dict()
            step(model)
            if precompute:
                precompute_float8_dynamic_scale_for_fsdp(model)
            write_whole(model, early, how)
            model.zero_grad()
            with traffic() as seen:
                results.append([step(model), *(whole(p.grad) for p in weights(model))])
            assert torch.uint8 in seen.gather_dtypes, how
            if precompute:  # a write moves the shards of some ranks, maybe, and all must agree
                precompute_float8_dynamic_scale_for_fsdp(model)
            results[-1].append(step(model))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), how


@pytest.mark.parametrize("hidden", [3, 42])  # no row on one rank; 11, 11, 11, 9
def test_a_stale_precomputed_scale_is_never_used(four: Ranks, hidden: int) -> None:
    four.run(stale_scales, hidden)


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
        with traffic() as seen:
            precomputed = step(model)
        assert seen.all_reduces == 0
        reference = shard(convert(model_of(42), "tensorwise"))
        reference.load_state_dict(model.state_dict())
        assert torch.equal(step(reference), precomputed)


def test_precomputing_after_a_load_and_before_a_forward(four: Ranks) -> None:
    four.run(loaded_between)


def few_rows() -> None:
    """Whether an empty shard was written cannot be seen, so its weight is not precomputed."""
    model = shard(convert(nn.Sequential(nn.Linear(8, 5, bias=False)), "tensorwise"))  # 2, 2, 1, 0
    precompute_float8_dynamic_scale_for_fsdp(model)
    with traffic() as seen:
        model(torch.ones(4, 8))
    assert seen.all_reduces == 1


def test_weights_of_which_a_rank_holds_nothing_are_not_precomputed(four: Ranks) -> None:
    four.run(few_rows)


def before_the_first_forward() -> None:
    """FSDP2 moves the shards of some ranks then; all must agree that no scale is known yet."""
    results = []
    for precompute in (True, False):
        model = shard(convert(model_of(42), "tensorwise"))
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        with traffic() as seen:
            results.append([step(model), *(whole(p.grad) for p in weights(model))])
        assert seen.all_reduces > 0
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_precomputing_before_the_first_forward(four: Ranks) -> None:
    four.run(before_the_first_forward)


def gathered_now() -> None:
    model = shard(convert(model_of(), "tensorwise"))
    model.unshard()
    with pytest.raises(TypeError, match=r"model: got int, expected an nn.Module"):
        precompute_float8_dynamic_scale_for_fsdp(3)
    model[0].unshard()
    with pytest.raises(ValueError, match=r"'0.ffn.w1': got a weight that is gathered(.)*reshard"):
        precompute_float8_dynamic_scale_for_fsdp(model)


def test_precomputing_while_weights_are_gathered_raises(two: Ranks) -> None:
    two.run(gathered_now)


def nan_on_one_rank(recipe: str, precompute: bool) -> None:
    for where in ("weight", "input"):
        model = shard(convert(model_of(), recipe))
        train(model, 2)
        x = batch(0, dist.get_rank(), torch.float32)
        if dist.get_rank() == 1 and where == "input":
            x[0, 0] = torch.nan
        if where == "weight":
            weight = model[0].ffn.w1.weight
            with torch.no_grad():
                local = weight.to_local()
                local[0, 0] = torch.nan if dist.get_rank() == 1 else local[0, 0]
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


@pytest.mark.parametrize(
    ("recipe", "precompute"), [("tensorwise", True), ("tensorwise", False), ("delayed", False)]
)
def test_nan_on_one_rank_shows_on_all(either: Ranks, recipe: str, precompute: bool) -> None:
    either.run(nan_on_one_rank, recipe, precompute)


class ReducedError(Exception):
    """On which device."""


def reduced_on_the_mesh() -> None:
    """A mesh of another type of device than the weights and amaxes are on, as with offloading."""

    def reduce(x: torch.Tensor, **_: object) -> None:
        raise ReducedError(x.device.type)

    models = {recipe: shard(convert(model_of(), recipe)) for recipe in ("tensorwise", "delayed")}
    for model in models.values():
        step(model)
    with (
        mock.patch.object(DeviceMesh, "device_type", "meta"),
        mock.patch.object(dist, "all_reduce", reduce),
    ):
        with pytest.raises(ReducedError, match="meta"):
            precompute_float8_dynamic_scale_for_fsdp(models["tensorwise"])
        with pytest.raises(ReducedError, match="meta"):
            sync_float8_amax_and_scale_history(models["delayed"])


def test_offloaded_amaxes_are_reduced_on_the_device_of_the_mesh(two: Ranks) -> None:
    two.run(reduced_on_the_mesh)


def one_scale_on_all() -> None:
    amax = torch.tensor([1.0, 2.0, 0.0, torch.inf])
    if dist.get_rank() == 1:
        amax = torch.tensor([-torch.nan, 1.0, 0.0, 1.0])
    all_reduce_amax(amax, (dist.group.WORLD,))
    assert amax[0].isnan()
    assert amax[1:].tolist() == [2.0, 0.0, torch.inf]


def test_a_maximum_over_ranks_keeps_nan(two: Ranks) -> None:
    two.run(one_scale_on_all)
