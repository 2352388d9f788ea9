"""Float8 weights on several ranks: held shards, weights without a master."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    Float8Tensor,
    Float8Weights,
    attach_to_optimizer,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
    update_float8_weights,
)
from float8.tensor import local_tensor
from sqnr import same_bits
from support.configs import of_recipe
from support.models import Adapted, LlamaBlock, seeded
from support.outcome import after_a_write, assert_same, casts_saved, outcome, train
from support.parallel import DIM, HIDDEN, TOKENS, part, plan_of
from support.ranks import on
from support.sharded import convert, fsdp1, here, keep, mesh_of, model_of, offload, shard

one_block = partial(model_of, blocks=1)
HELD, ONLY, ON_THE_FLY = Float8Weights.HELD, Float8Weights.ONLY, Float8Weights.ON_THE_FLY


@pytest.mark.parametrize(
    "recipe",
    ["tensorwise", "rowwise", pytest.param("delayed recipe", marks=pytest.mark.exhaustive)],
)
@on("either")
def test_shards_are_cast_once_per_step(recipe: str) -> None:
    """Each of three weights is gathered four times in the second step.

    Under one scale all are cast by a kernel that is no op; else each is, after both steps.
    """
    wrap = partial(shard, param_dtype=torch.bfloat16)
    saved = 4 - 2 * (recipe == "rowwise")
    assert casts_saved(recipe, wrap, make=one_block) == 3 * saved


@pytest.mark.parametrize(
    ("wrap", "saved"), [(keep, 2), pytest.param(offload, 4, marks=pytest.mark.exhaustive)]
)
@on("two")
def test_weights_that_stay_gathered_or_are_offloaded(wrap: Any, saved: int) -> None:
    on_cpu = partial(one_block, device="cpu")
    if wrap is offload and here().type == "cuda":
        saved = 0  # FSDP2 copies shards to the GPU before they are cast
    assert casts_saved("tensorwise", wrap, make=on_cpu) == 3 * saved


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(3 * parameter.data)


def reload(model: nn.Module) -> None:
    model.load_state_dict({name: 3 * x for name, x in model.state_dict().items()})


@on("two")
def test_a_shard_that_was_written_is_cast_again() -> None:
    for write in (average, reload):
        assert same_bits(*after_a_write(write, "tensorwise", one_block))


@on("two")
def test_a_load_of_some_weights_drops_casts_on_all_ranks() -> None:
    """After any load FSDP2 pads uneven shards anew; ranks with even ones must not wait for it."""
    model = shard(convert(nn.Sequential(nn.Sequential(nn.Linear(32, 97))), "tensorwise"))
    x = seeded(0, 16, 32, device=here())
    before, name = model(x), "0.0.bias"
    precompute_float8_dynamic_scale_for_fsdp(model)
    weight = model[0][0].weight
    assert local_tensor(weight).kept(weight) is not None
    model.load_state_dict({name: 1 * model.state_dict()[name]}, strict=False)
    assert local_tensor(weight).kept(weight) is None
    assert torch.equal(model(x), before)


@on("two")
def test_ranks_without_rows() -> None:
    """Only the first rank has rows to write, yet both take part in the next all-reduce."""
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 1, bias=False)))
    model = shard(convert(model, "tensorwise", float8_weights=HELD))
    x = seeded(0, 4, 32)
    model(x)
    precompute_float8_dynamic_scale_for_fsdp(model)
    before = model(x)
    with torch.no_grad():
        local: Tensor = model[0][0].weight.to_local()
        if len(local):  # as a checkpoint library loads
            local.mul_(2)
    assert torch.equal(model(x), 2 * before)


@on("two")
def test_without_a_float8_gather_there_is_nothing_to_hold() -> None:
    expected = (
        r"layer '.*0.*ffn.w1': got float8_weights=HELD for a weight that FSDP gathers in high"
    )
    for wrap, use in (
        (shard, partial(train, steps=1)),
        (fsdp1, update_float8_weights),
        (partial(fsdp1, orig=False), update_float8_weights),
    ):
        model = wrap(convert(one_block(), "tensorwise", all_gather=False, float8_weights=HELD))
        with pytest.raises(ValueError, match=expected):
            use(model)


@torch.no_grad()
def differ(model: nn.Module) -> None:
    """DDP sends the weights of the first rank."""
    for parameter in model.parameters():
        parameter.mul_(1 + dist.get_rank())


@on("two")
def test_models_that_are_wrapped_afterwards() -> None:
    """What was held of whole weights is not used for what a wrapper puts in their place."""
    for wrap in (DistributedDataParallel, shard, fsdp1, partial(fsdp1, orig=False)):

        def held(model: nn.Module, wrap: Any = wrap) -> nn.Module:
            update_float8_weights(model)
            return wrap(model)

        how = {"make": one_block, "edit": differ, "attach": False, "steps": 2}
        weights = ({"float8_weights": each} for each in (ON_THE_FLY, HELD))
        one, other = (outcome("tensorwise", False, held, config=x, **how) for x in weights)
        assert_same(one, other, wrap)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@on("two")
def test_adapters_of_a_base_in_float8_only(recipe: str) -> None:
    found = []
    for weights in (ON_THE_FLY, ONLY):
        torch.manual_seed(0)
        model = nn.Sequential(Adapted(), Adapted())
        convert_to_float8_training(
            model,
            config=of_recipe(recipe, float8_weights=weights),
            module_filter_fn=lambda _, name: name.endswith("base"),
        )
        wrapped = DistributedDataParallel(model)
        assert isinstance(model[0].base.weight, Float8Tensor) == (weights is ONLY)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        attach_to_optimizer(wrapped, optimizer)
        for step in range(3):
            y = wrapped(seeded(10 * step + dist.get_rank(), 8, 32))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(y.detach())
    assert all(map(same_bits, found[:3], found[3:]))


@on("two")
def test_weights_under_tensor_parallel_are_cast_on_the_fly() -> None:
    found = []
    for weights in (ON_THE_FLY, HELD):
        torch.manual_seed(0)
        block = LlamaBlock(DIM, HIDDEN)
        convert(block, "tensorwise", all_gather=False, float8_weights=weights)
        parallelize_module(block, mesh_of(), plan_of("float8", sequence=True))
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attach_to_optimizer(block, optimizer)
        said = [str(each.message) for each in caught if "on the fly" in str(each.message)]
        assert len(said) == (weights is HELD)
        assert all("7 layer(s)" in each for each in said)
        assert all("attention.wq (under tensor parallel)" in each for each in said)
        for step in range(2):
            y = block(part(seeded(step, 2, TOKENS, DIM, device=here()), 1))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([y.detach(), *(local_tensor(x) for x in block.state_dict().values())])
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))
