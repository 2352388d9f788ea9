"""Float8 weights on several ranks: held shards, weights without a master."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    Float8Tensor,
    Float8Weights,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    update_float8_weights,
)
from float8.parallel.fsdp import FSDPFloat8Weight
from float8.tensor import local_tensor
from sqnr import same_bits
from support.configs import RECIPES
from support.microbatches import layers_of, with_weights
from support.models import seeded
from support.ranks import Ranks
from support.sharded import (
    Run,
    batch,
    convert,
    here,
    mesh_of,
    model_of,
    shard,
    traffic,
    train,
)

HELD, ONLY = Float8Weights.HELD, Float8Weights.ONLY


@contextmanager
def counting_shards() -> Iterator[Counter[int]]:
    """Casts of shards, by the id of the Parameter."""
    counts: Counter[int] = Counter()
    cast = FSDPFloat8Weight._cast

    def counted(self, module, *args):
        counts[id(module.weight)] += 1
        return cast(self, module, *args)

    with mock.patch.object(FSDPFloat8Weight, "_cast", counted):
        yield counts


def trained(recipe: str, param_dtype: torch.dtype | None = None, **more) -> tuple[Run, Counter]:
    offload = (
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if more.pop("offload", False) else {}
    )
    reshard = {"reshard_after_forward": more.pop("reshard", True)}
    model = shard(
        convert(model_of(device="cpu" if offload else None), recipe, **more),
        param_dtype=param_dtype,
        **offload,
        **reshard,
    )
    with counting_shards() as casts:
        run = train(model, 4, microbatches=3)
    return run, casts


def held_equals_on_the_fly(recipe: str, param_dtype: torch.dtype | None = None, **how) -> None:
    """With AdamW and accumulation; each weight is gathered often and cast once per step."""
    wanted, before = trained(recipe, param_dtype, **how)
    got, casts = trained(recipe, param_dtype, **how, float8_weights=HELD)
    got.assert_equal(wanted)
    assert len(casts) == len(before) == 6  # weights
    assert set(before.values()) == {4 * 3 * (2 if how.get("reshard", True) else 1)}
    # With delayed scaling the first step has no scale yet, and each gather asks for one.
    first = before.total() // 6 // 4 if recipe == "delayed" else 1
    assert set(casts.values()) == {first + 3}


@pytest.mark.parametrize("recipe", [*RECIPES, "rowwise"])
def test_held_equals_on_the_fly(either: Ranks, recipe: str) -> None:
    either.run(held_equals_on_the_fly, recipe, torch.bfloat16)


def others() -> None:
    held_equals_on_the_fly("tensorwise", reshard=False)
    held_equals_on_the_fly("delayed", reshard=False)
    held_equals_on_the_fly("tensorwise", offload=True)


def test_weights_that_stay_gathered_or_are_offloaded(two: Ranks) -> None:
    two.run(others)


def bytes_per_element(recipe: str) -> None:
    """What docs/float8_weights.md counts: held and sent is one byte for each element of a shard."""
    model = shard(convert(model_of(), recipe, float8_weights=HELD))
    train(model, 2)
    with traffic() as seen, torch.no_grad():
        model(batch(0, 0, torch.float32))
    weights = [layer.weight for layer in layers_of(model)]
    elements = sum(weight.numel() for weight in weights) // dist.get_world_size()
    shards = [local_tensor(weight) for weight in weights]
    assert sum(shard.high_precision.nbytes for shard in shards) == 4 * elements
    held = sum(shard._known[0].row.data.numel() for shard in shards)
    norms = sum(p.numel() for p in model.parameters()) // dist.get_world_size() - elements
    assert held == elements
    assert sum(seen.sizes) == elements + 4 * norms


def four_ranks() -> None:
    held_equals_on_the_fly("tensorwise")
    bytes_per_element("tensorwise")


def test_four_ranks_and_the_bytes_of_each(four: Ranks) -> None:
    four.run(four_ranks)


def as_it_is(write: Callable[[nn.Module], None]) -> None:
    outputs = []
    for weights in (Float8Weights.ON_THE_FLY, HELD):
        model = shard(convert(model_of(), "tensorwise", float8_weights=weights))
        train(model, 1)
        with torch.no_grad():
            model(batch(0, 0, torch.float32))
            write(model)
            outputs.append(model(batch(0, 0, torch.float32)))
    assert same_bits(*outputs)


def writes() -> None:
    def by_hand(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.mul_(3)

    def averages(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.copy_(3 * parameter.data)

    def load(model: nn.Module) -> None:
        model.load_state_dict({name: 3 * x for name, x in model.state_dict().items()})

    for write in (by_hand, averages, load):
        as_it_is(write)


def test_a_shard_that_was_written_is_cast_again(two: Ranks) -> None:
    two.run(writes)


def few_rows() -> None:
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


def test_ranks_without_rows(two: Ranks) -> None:
    two.run(few_rows)


def errors() -> None:
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


def test_without_a_float8_gather_there_is_nothing_to_hold(two: Ranks) -> None:
    two.run(errors)


def held_before(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """What was held of whole weights is not used for what a wrapper puts in their place."""
    runs = []
    for weights in (Float8Weights.ON_THE_FLY, HELD):
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


def wrapped_afterwards() -> None:
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


def test_models_that_are_wrapped_afterwards(two: Ranks) -> None:
    two.run(wrapped_afterwards)


# ---------------------------------------------------------------- without a master


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32, bias=False).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + self.lora_b(self.lora_a(x)))


def leave_the_base(model: nn.Sequential) -> nn.Module:
    frozen = {each.base.weight for each in model}
    for each in model:
        fully_shard(each, mesh=mesh_of(), ignored_params=frozen)
    return fully_shard(model, mesh=mesh_of(), ignored_params=frozen)


def adapters() -> None:
    for wrap in (DistributedDataParallel, leave_the_base):
        runs = []
        for weights in (Float8Weights.ON_THE_FLY, ONLY):
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


def test_adapters_of_a_base_in_float8_only(two: Ranks) -> None:
    two.run(adapters)
