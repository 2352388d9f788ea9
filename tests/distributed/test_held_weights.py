"""Float8 weights on several ranks: held shards, weights without a master."""

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    Float8Tensor,
    Float8Weights,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    update_float8_weights,
)
from float8.tensor import local_tensor
from sqnr import same_bits
from support.microbatches import with_weights
from support.models import Adapted, LlamaBlock, seeded
from support.parallel import DIM, HIDDEN, TOKENS, part, plan_of
from support.ranks import Ranks, on
from support.sharded import Run, batch, convert, here, mesh_of, model_of, shard, train
from support.spies import OpCounter

HELD, ONLY, ON_THE_FLY = Float8Weights.HELD, Float8Weights.ONLY, Float8Weights.ON_THE_FLY


def trained(
    recipe: str,
    param_dtype: torch.dtype | None,
    reshard: bool,
    device: str | None,
    weights: Float8Weights,
) -> tuple[Run, int]:
    """Four steps of three microbatches; and the casts."""
    model = convert(model_of(device=device), recipe, float8_weights=weights)
    offload = {} if device is None else {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    model = shard(model, param_dtype=param_dtype, reshard_after_forward=reshard, **offload)
    with OpCounter() as counter:
        run = train(model, 4, microbatches=3)
    return run, sum(n for name, n in counter.ops.items() if name.startswith("float8.cast"))


def held_equals_on_the_fly(
    recipe: str,
    param_dtype: torch.dtype | None = None,
    reshard: bool = True,
    device: str | None = None,
) -> None:
    """With AdamW and accumulation; each weight is gathered often and cast once per step."""
    how = recipe, param_dtype, reshard, device
    wanted, before = trained(*how, ON_THE_FLY)
    got, casts = trained(*how, HELD)
    got.assert_equal(wanted)
    gathers = 3 * (2 if reshard else 1)
    assert before - casts == 6 * 4 * (gathers - 1)  # of six weights in four steps


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed recipe"])
def test_held_equals_on_the_fly(either: Ranks, recipe: str) -> None:
    either.run(held_equals_on_the_fly, recipe, torch.bfloat16)


@on("two")
def test_weights_that_stay_gathered_or_are_offloaded() -> None:
    held_equals_on_the_fly("tensorwise", reshard=False)
    held_equals_on_the_fly("tensorwise", device="cpu")


@on("two")
def test_weights_with_delayed_scaling_are_cast_on_the_fly() -> None:
    model = shard(convert(model_of(), "delayed", float8_weights=HELD))
    with pytest.warns(UserWarning, match=r"6 layer\(s\) cast .*w1 \(with delayed scaling\)"):
        update_float8_weights(model)


def averages(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(3 * parameter.data)


def reload(model: nn.Module) -> None:
    model.load_state_dict({name: 3 * x for name, x in model.state_dict().items()})


@on("two")
def test_a_shard_that_was_written_is_cast_again() -> None:
    for write in (averages, reload):
        outputs = []
        for weights in (ON_THE_FLY, HELD):
            model = shard(convert(model_of(), "tensorwise", float8_weights=weights))
            train(model, 1)
            with torch.no_grad():
                model(batch(0, 0, torch.float32))
                write(model)
                outputs.append(model(batch(0, 0, torch.float32)))
        assert same_bits(*outputs)


@on("two")
def test_ranks_without_rows() -> None:
    """Only the first rank has rows to write, yet both take part in the next all-reduce."""
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 1, bias=False))).to(here())
    model = shard(convert(model, "tensorwise", float8_weights=HELD))
    x = seeded(0, 4, 32, device=here())
    before = model(x)
    with torch.no_grad():
        local: Tensor = model[0][0].weight.to_local()
        if len(local):  # as a checkpoint library loads
            local.mul_(2)
    assert torch.equal(model(x), 2 * before)


@on("two")
def test_without_a_float8_gather_there_is_nothing_to_hold() -> None:
    expected = r"layer '.*0.ffn.w1': got float8_weights=HELD for a weight that FSDP gathers in high"
    model = convert(model_of(), "tensorwise", all_gather=False, float8_weights=HELD)
    sharded = shard(model)
    with pytest.raises(ValueError, match=expected):
        train(sharded, 1)
    for orig in (True, False):
        model = convert(model_of(), "tensorwise", all_gather=False, float8_weights=HELD)
        wrapped = FullyShardedDataParallel(model, use_orig_params=orig, device_id=here())
        with pytest.raises(ValueError, match=expected):
            update_float8_weights(wrapped)


def held_before(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """What was held of whole weights is not used for what a wrapper puts in their place."""
    runs = []
    for weights in (ON_THE_FLY, HELD):
        torch.manual_seed(dist.get_rank())  # DDP sends the weights of the first rank
        model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32)).to(here())
        convert_to_float8_training(
            model, config=with_weights(None, weights), module_filter_fn=all_linears
        )
        update_float8_weights(model)
        model = wrap(model)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for step in range(3):
            y = model(seeded(step, 8, 32, device=here()))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(y.detach())
        runs.append(torch.stack(found))
    assert same_bits(*runs)


@on("two")
def test_models_that_are_wrapped_afterwards() -> None:
    held_before(DistributedDataParallel)
    held_before(lambda model: fully_shard(model, mesh=mesh_of()))
    for orig in (True, False):
        held_before(
            functools.partial(
                FullyShardedDataParallel,
                use_orig_params=orig,  # type: ignore[arg-type]
                device_id=here(),
            )
        )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on("two")
def test_weights_under_tensor_parallel_are_cast_on_the_fly(recipe: str) -> None:
    found = []
    for weights in (ON_THE_FLY, HELD):
        torch.manual_seed(0)
        block = LlamaBlock(DIM, HIDDEN).to(here())
        convert(block, recipe, all_gather=False, float8_weights=weights)
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


def leave_the_base(model: nn.Sequential) -> nn.Module:
    frozen = {each.base.weight for each in model}
    for each in model:
        fully_shard(each, mesh=mesh_of(), ignored_params=frozen)
    return fully_shard(model, mesh=mesh_of(), ignored_params=frozen)


@on("two")
def test_adapters_of_a_base_in_float8_only() -> None:
    for wrap in (DistributedDataParallel, leave_the_base):
        runs = []
        for weights in (ON_THE_FLY, ONLY):
            torch.manual_seed(0)
            model = nn.Sequential(Adapted(), Adapted()).to(here())
            convert_to_float8_training(
                model,
                config=with_weights(None, weights),
                module_filter_fn=lambda _, name: name.endswith("base"),
            )
            wrapped = wrap(model)
            assert isinstance(model[0].base.weight, Float8Tensor) == (weights is ONLY)
            trainable = [p for p in wrapped.parameters() if p.requires_grad]
            optimizer, found = torch.optim.AdamW(trainable, lr=0.01), []
            attach_to_optimizer(wrapped, optimizer)
            for step in range(3):
                y = wrapped(seeded(10 * step + dist.get_rank(), 8, 32, device=here()))
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(y.detach())
            runs.append(torch.stack(found))
        assert same_bits(*runs)
