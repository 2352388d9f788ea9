"""Changing a model under FSDP2 and DDP, and what is refused by name."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import float8
from float8 import (
    Float8Weights,
    all_linears,
    attach_to_optimizer,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from support.configs import tensorwise
from support.models import gradients, seeded
from support.ranks import on
from support.sharded import DIM, convert, mesh_of, model_of, shard, train, whole


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(seeded(3, 16, DIM)).square().mean().backward()
    return {name.removeprefix("module."): whole(x) for name, x in gradients(model).items()}


@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
@on("two")
def test_a_wrapped_model_changes(wrap: str) -> None:
    wrapped = []
    for recipe in (None, "delayed", "tensorwise"):
        model = model_of(42)
        if recipe is not None:
            convert(model, recipe, all_gather=False)
        wrapped.append(shard(model) if wrap == "fsdp" else DistributedDataParallel(model))
    plain, model, dynamic = wrapped
    grads_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    attach_to_optimizer(model, optimizer).remove()
    convert_to_float8_training(model, config=tensorwise(), module_filter_fn=all_linears)
    assert conversion_report(model).converted
    if wrap == "ddp":  # it keeps a list of buffers, which are gone
        model = DistributedDataParallel(model.module)
    wanted, got = grads_of(dynamic), grads_of(model)
    assert all(torch.equal(got[name], x) for name, x in wanted.items())
    convert_to_high_precision(model)
    assert not conversion_report(model).converted
    wanted, got = grads_of(plain), grads_of(model)
    assert all(torch.equal(got[name], x) for name, x in wanted.items())


@on("two")
def test_weights_that_are_gathered_in_float8_are_refused() -> None:
    model = shard(convert(model_of(42), "delayed"))
    train(model, 1)
    before = [type(layer) for layer in model.modules()]
    for change in (
        convert_to_high_precision,
        lambda m: convert_to_float8_training(m, config=tensorwise(), module_filter_fn=all_linears),
    ):
        with pytest.raises(ValueError, match="got a weight that FSDP2 gathers in float8, expected"):
            change(model)
    assert [type(layer) for layer in model.modules()] == before


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
    with pytest.raises(NotImplementedError, match=r"out of fully_shard, by ignored_params"):
        fully_shard(model, mesh=mesh_of())
