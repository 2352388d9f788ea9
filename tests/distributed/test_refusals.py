"""What is spread over ranks in a way that layers cannot follow is refused by name."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import float8
from float8 import Float8Weights, convert_to_float8_training
from support.configs import tensorwise
from support.models import seeded
from support.ranks import on
from support.sharded import mesh_of


@on("two")
def test_dtensors_given_to_a_function_or_to_a_layer_of_plain_tensors() -> None:
    mesh = mesh_of()
    x, w = seeded(0, 8, 32), seeded(1, 64, 32)
    placed = distribute_tensor(x, mesh, [Replicate()])
    for weight in (distribute_tensor(w, mesh, [Shard(0)]), w):
        name = "weight" if weight is not w else "input and none as weight"
        with pytest.raises(TypeError, match=rf"got a DTensor as {name}, .*Float8ColwiseParallel"):
            float8.linear(placed, weight)
    layer = convert_to_float8_training(nn.Linear(32, 64))
    with pytest.raises(TypeError, match=r"got a DTensor as input and none as weight"):
        layer(placed)
    assert float8.linear(placed.to_local(), w).shape == (8, 64)


@on("two")
def test_weights_that_are_sharded_already_are_not_in_float8_only() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).requires_grad_(False)
    fully_shard(model, mesh=mesh_of())
    with pytest.warns(UserWarning, match=r"got a weight that ranks share with float8_weights=ONLY"):
        convert_to_float8_training(model, config=tensorwise(float8_weights=Float8Weights.ONLY))
    assert type(model[0]) is nn.Linear
    assert isinstance(model(torch.ones(4, 32)), Tensor)


@on("two")
def test_weights_in_float8_only() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).requires_grad_(False)
    convert_to_float8_training(model, config=tensorwise(float8_weights=Float8Weights.ONLY))
    with pytest.raises(NotImplementedError, match=r"as fully_shard calls it, .*ignored_params"):
        fully_shard(model, mesh=mesh_of())
