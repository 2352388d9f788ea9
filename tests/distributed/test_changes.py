"""Changing a model that ranks share, and its state dicts; and what is refused by name."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    Float8Linear,
    Float8Weights,
    attach_to_optimizer,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    linear,
    precompute_float8_dynamic_scale_for_fsdp,
)
from float8.fsdp.gather import Float8GatherWeight
from float8.tensor import local_tensor
from support.configs import tensorwise
from support.errors import require_errors
from support.models import gradients, seeded
from support.outcome import assert_same, outcome, train
from support.ranks import on
from support.sharded import DIM, batch, convert, fsdp1, mesh_of, model_of, shard, whole

ONLY = tensorwise(float8_weights=Float8Weights.ONLY)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(seeded(3, 16, DIM)).square().mean().backward()
    return {name.removeprefix("module."): whole(x) for name, x in gradients(model).items()}


@pytest.mark.parametrize("wrap", [shard, DistributedDataParallel])
@on("two")
def test_a_wrapped_model_changes(wrap: Any) -> None:
    plain, model, dynamic = (
        model_of(42, blocks=1),
        *(convert(model_of(42, blocks=1), recipe, False) for recipe in ("delayed", "tensorwise")),
    )
    plain, model, dynamic = map(wrap, (plain, model, dynamic))
    grads_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    attach_to_optimizer(model, optimizer).remove()
    convert(model, "tensorwise", False)
    assert conversion_report(model).converted
    if wrap is DistributedDataParallel:  # it keeps a list of buffers, which are gone
        model = wrap(model.module)
    assert_same(grads_of(model), grads_of(dynamic))
    convert_to_high_precision(model)
    assert not conversion_report(model).converted
    assert_same(grads_of(model), grads_of(plain))


@on("two")
def test_converting_after_sharding_works_but_for_a_gather_in_float8() -> None:
    row = {"make": partial(model_of, 42, blocks=1), "steps": 3}
    after = train(convert(shard(model_of(42, blocks=1)), "delayed", all_gather=False), 3)
    assert_same(after, outcome("delayed", False, **row))
    once = outcome("tensorwise", True, make=partial(model_of, 42, blocks=1), steps=2)
    twice = shard(convert(model_of(42, blocks=1), "tensorwise"))
    assert_same(train(convert(twice, "tensorwise"), 2), once)


@on("two")
def test_state_dicts_hold_plain_weights() -> None:
    model = shard(convert(model_of(42, blocks=1), "delayed"))
    train(model, 2)
    sharded = {n: v for n, v in model.state_dict().items() if "fp8_" not in n}
    assert all(type(v.to_local()) is Tensor for v in sharded.values())
    plain, again = model_of(42, blocks=1), shard(convert(model_of(42, blocks=1), "delayed"))
    plain.load_state_dict({n: whole(v) for n, v in sharded.items()})
    again.load_state_dict(sharded)
    wanted = {name: whole(x) for name, x in model.named_parameters()}
    for other in (plain, again):
        assert_same({name: whole(x) for name, x in other.named_parameters()}, wanted)
    assert isinstance(again[0].ffn.w1.weight.to_local(), Float8GatherWeight)


@on("two")
def test_a_state_dict_taken_before_the_first_forward_stays_one_of_the_model() -> None:
    model = shard(
        convert(model_of(40, blocks=1), "delayed")
    )  # even: others torch moves, see the class
    early = model.state_dict()
    train(model, 1)
    weights = {n: v for n, v in model.state_dict().items() if "ffn" in n and "fp8_" not in n}
    assert_same({n: whole(early[n]) for n in weights}, {n: whole(weights[n]) for n in weights})
    with torch.no_grad():
        early["0.ffn.w1.weight"].zero_()
        early["0.ffn.w2.weight"].to_local().zero_()
    for name in ("0.ffn.w1.weight", "0.ffn.w2.weight"):
        assert (whole(weights[name]) == 0).all(), name


@on("two")
def test_a_first_forward_in_inference_mode_does_what_torch_alone_does() -> None:
    """Torch's own buffers of the gather are inference tensors then: it evaluates, and only that."""
    x = batch(0, dist.get_rank())
    for made in (model_of, lambda hidden: convert(model_of(hidden), "tensorwise")):
        models, outputs = [shard(made(42)) for _ in range(2)], []
        for model, mode in zip(models, (torch.inference_mode(), torch.no_grad()), strict=True):
            with mode:
                outputs += [model(x), model(x)]
            assert not any(parameter.is_inference() for parameter in model.parameters())
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        with pytest.raises(RuntimeError, match=r"[Ii]nference tensor"):
            models[0](x).sum().backward()


@on("two")
def test_buffers_of_delayed_scaling_that_are_dtensors_begin_anew() -> None:
    model = distribute_module(convert(model_of(), "delayed"), mesh_of())
    layer = next(x for x in model.modules() if isinstance(x, Float8Linear))
    layer.get_buffer("fp8_amax_input").fill_(3)
    model.load_state_dict({k: v for k, v in model.state_dict().items() if "fp8" not in k})
    assert float(local_tensor(layer.get_buffer("fp8_amax_input"))) == 0
    layer.reset_parameters()


@on("two")
def test_what_is_refused() -> None:
    mesh = mesh_of()
    gathered, unsharded = (
        shard(convert(model_of(42, blocks=1), "delayed")),
        convert(model_of(), "tensorwise"),
    )
    train(gathered, 1)
    shard(unsharded).unshard()
    unsharded[0].unshard()
    only = convert_to_float8_training(nn.Linear(32, 64).requires_grad_(False), config=ONLY)
    x, w = seeded(0, 8, 32), seeded(1, 64, 32)
    placed, of_rows = (
        distribute_tensor(x, mesh, [Replicate()]),
        distribute_tensor(w, mesh, [Shard(0)]),
    )
    in_float8 = "ValueError: got a weight that FSDP2 gathers in float8, expected"
    ahead, sharded = precompute_float8_dynamic_scale_for_fsdp, shard(model_of())
    before = [type(layer) for layer in gathered.modules()]
    require_errors(
        (in_float8, convert_to_high_precision, [gathered]),
        (in_float8, convert, [gathered, "tensorwise", False]),
        (r"ValueError: '0.ffn.w1': got a DTensor(.)*convert the", convert, [sharded, "rowwise"]),
        (r"RuntimeError: FSDP1(.)*all_gather=False", fsdp1, [convert(model_of(), "tensorwise")]),
        ("TypeError: model: got int, expected an nn.Module", ahead, [3]),
        (r"ValueError: '0.ffn.w1': got a weight that is gathered(.)*reshard", ahead, [unsharded]),
        ("NotImplementedError: out of fully_shard, by ignored_params", fully_shard, [only]),
        (r"TypeError: DTensor as weight, .*Float8ColwiseParallel", linear, [placed, of_rows]),
        (r"TypeError: as input and none as weight, .*Float8ColwiseP", linear, [placed, w]),
        ("TypeError: got a DTensor as input and none as weight", Float8Linear(32, 64), [placed]),
    )
    assert [type(layer) for layer in gathered.modules()] == before
    assert linear(placed.to_local(), w).shape == (8, 64)

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).requires_grad_(False)
    fully_shard(model, mesh=mesh)
    with pytest.warns(UserWarning, match=r"got a weight that ranks share with float8_weights=ONLY"):
        convert_to_float8_training(model, config=ONLY)
    assert type(model[0]) is nn.Linear
    assert isinstance(model(torch.ones(4, 32)), Tensor)
