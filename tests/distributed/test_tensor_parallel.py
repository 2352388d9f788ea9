"""FSDP2 on top of tensor parallel: one scale for the whole weight, over both dims of the mesh."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from float8 import Float8Linear, Float8Tensor, precompute_float8_dynamic_scale_for_fsdp
from float8.parallel.amax import sync_groups
from support.models import seeded
from support.ranks import Ranks
from support.sharded import convert, here, part, traffic


class OnShards(nn.Module):
    """A layer that computes with the part of its weight that tensor parallel left here."""

    def __init__(self, layer: Float8Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        assert isinstance(local, Float8Tensor)
        rows, columns = local.shape
        self.layer.in_features, self.layer.out_features = columns, rows
        return torch.func.functional_call(self.layer, {"weight": local}, (x,))


def sharded(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    model = convert(nn.Sequential(*layers).to(here()), "tensorwise")
    model[1].weight.data[-1, -1] = 3.0  # the amax is in the last part along both dims
    model[0].weight.data[0, 0] = 2.0  # and in the first
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in model:  # plain tensor parallel would hand it DTensors
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
    model = nn.Sequential(*map(OnShards, model))
    for layer in model:
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def scales(model: nn.Module) -> list[Tensor]:
    found = []
    for block in model:
        block.unshard()
        found.append(block.layer.weight.to_local()._scale.clone())
        block.reshard()
    return found


def whole_scales() -> None:
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("data", "tensor"))
    x = seeded(mesh.get_local_rank("data"), 16, 32, device=here())
    results = []
    for precompute in (False, True):
        model = sharded(mesh)
        weights = [block.layer.weight.full_tensor() for block in model]
        model(x)  # shards are known from here on
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        with traffic() as seen:
            y = model(x)
        assert seen.all_reduces == (0 if precompute else 4)  # two weights, two dims
        y.square().mean().backward()
        got = scales(model)
        for weight, scale in zip(weights, got, strict=True):
            assert torch.equal(Float8Tensor.from_high_precision(weight)._scale, scale)
        results.append([y.detach(), *got, *(part(p.grad) for p in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def gathered_at_a_sync() -> None:
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("data", "tensor"))
    model = sharded(mesh)
    for block in model:
        block.unshard()
    weights = [block.layer.weight for block in model]
    assert all(weight.device_mesh == mesh["tensor"] for weight in weights)
    with pytest.raises(ValueError, match=r"got weights that are gathered(.)*reshard"):
        sync_groups(weights, None)
    for block in model:
        block.reshard()
    assert len(sync_groups([block.layer.weight for block in model], None)) in (1, 2)  # all four


def test_gathered_weights_do_not_tell_which_ranks_share_amaxes(four: Ranks) -> None:
    four.run(gathered_at_a_sync)


def test_the_scale_is_that_of_the_whole_weight_precomputed_or_not(four: Ranks) -> None:
    four.run(whole_scales)
