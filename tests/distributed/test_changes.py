"""Changing a model under FSDP2 and DDP, GPT2's weights, and what is refused by name."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
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
from support.configs import delayed, tensorwise
from support.models import gradients, seeded
from support.ranks import Ranks, on
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


def gpt2_on_ranks(path: str, recipe: str, all_gather: bool) -> None:
    hf = pytest.importorskip("support.hugging_face")
    config = {"tensorwise": tensorwise, "delayed": delayed}[recipe](
        enable_fsdp_float8_all_gather=all_gather
    )
    model = convert_to_float8_training(hf.gpt2(), config=config)
    alone = convert_to_float8_training(hf.gpt2(), config=config)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    tokens = hf.tokens()
    for one in (model, alone):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        attach_to_optimizer(one, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            one(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    wanted = alone.state_dict()
    assert full.keys() == wanted.keys()
    for name, x in full.items():
        torch.testing.assert_close(x, wanted[name], rtol=1e-4, atol=1e-5)
    # Into a sharded one by torch's own functions, and into the tensors of a plain model's state.
    other = convert_to_float8_training(hf.gpt2(1), config=config)
    for block in other.transformer.h:
        fully_shard(block)
    fully_shard(other)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(other, copy.deepcopy(full), options=options)
    again = get_model_state_dict(other, options=options)
    assert all(torch.equal(again[name], x) for name, x in full.items())
    dcp.save(model.state_dict(), checkpoint_id=path)
    plain = hf.gpt2(1)
    dcp.load(plain.state_dict(), checkpoint_id=path)
    assert all(torch.equal(x, full[name]) for name, x in plain.state_dict().items())


@pytest.mark.parametrize(("recipe", "all_gather"), [("tensorwise", True), ("delayed", False)])
def test_conv1d_is_sharded_and_its_checkpoints_stay_those_of_gpt2(
    two: Ranks, recipe: str, all_gather: bool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    two.run(gpt2_on_ranks, str(tmp_path), recipe, all_gather)


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
