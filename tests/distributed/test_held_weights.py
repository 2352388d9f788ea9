"""Float8 weights on several ranks: held shards, weights without a master."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
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
from support.microbatches import counting_casts, layers_of, with_weights
from support.models import seeded
from support.parallel import DIM, TOKENS, FusedBlock, LlamaBlock, fused_plan, part, plan_of
from support.parallel import mesh_of as parallel_mesh
from support.ranks import Ranks
from support.sharded import (
    FunctionalTraffic,
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
    # With delayed scaling the first two steps have no scale yet, and each gather asks for one.
    each = before.total() // 6 // 4 if recipe == "delayed" else 1
    assert set(casts.values()) == {2 * each + 2}


@pytest.mark.parametrize("recipe", [*RECIPES, "rowwise"])
def test_held_equals_on_the_fly(either: Ranks, recipe: str) -> None:
    either.run(held_equals_on_the_fly, recipe, torch.bfloat16)


def others() -> None:
    held_equals_on_the_fly("tensorwise", reshard=False)
    held_equals_on_the_fly("delayed", reshard=False)
    held_equals_on_the_fly("delayed recipe", reshard=False)
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


# ---------------------------------------------------------------- tensor parallel


def shared_block(recipe: str, how: str, weights: Float8Weights) -> nn.Module:
    """`how`: "prepared" takes inputs once for all layers that read them, the others per layer."""
    torch.manual_seed(0)
    block = (FusedBlock() if how == "fused" else LlamaBlock()).to(here())
    convert(block, recipe, all_gather=False, float8_weights=weights)
    plan = plan_of("float8", sequence=True) if how == "prepared" else fused_plan(sequence=True)
    return parallelize_module(block, parallel_mesh(), plan)


@torch.no_grad()
def write_weights(block: nn.Module) -> None:
    """On each rank alike, through each of the tensors that a DTensor is."""
    for layer in layers_of(block):
        layer.weight.mul_(3)
        layer.weight.to_local().div_(2)


def train_shared(
    recipe: str, how: str, weights: Float8Weights, compiled: bool
) -> tuple[dict[str, Tensor], list[int], Counter[int]]:
    """Four AdamW steps of two microbatches; weights are written by hand before the third.

    Returns all bits that come out, how often ranks are asked for a number in each step's
    microbatches, and the casts to hold of each weight.
    """
    torch._dynamo.reset()
    block = shared_block(recipe, how, weights)
    model = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    found, asked = {}, []
    with counting_casts() as casts:
        attach_to_optimizer(block, optimizer)
        for step in range(4):
            if step == 2:
                write_weights(block)
            with nullcontext() if compiled else FunctionalTraffic() as seen:
                for microbatch in range(2):
                    x = seeded(10 * step + microbatch, 2, TOKENS, DIM, device=here())
                    y = model(part(x, 1))
                    y.square().mean().backward()
                    found[f"output {step}.{microbatch}"] = y.detach()
            asked.append(sum(size <= 16 for *_, size in seen.seen) if seen else 0)
            for name, parameter in block.named_parameters():
                found[f"grad {step} {name}"] = local_tensor(parameter.grad).clone()
            optimizer.step()
            optimizer.zero_grad()
    state = {name: local_tensor(x).clone() for name, x in block.state_dict().items()}
    return found | state, asked, casts


def tensor_parallel(recipe: str, how: str, compiled: bool = False) -> None:
    # What `aot_eager` compiles has the bits of eager mode.
    wanted, before, _ = train_shared(recipe, how, Float8Weights.ON_THE_FLY, False)
    got, after, casts = train_shared(recipe, how, HELD, compiled)
    assert got.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert same_bits(got[name], expected), name
    # When attached and after each step; in eager mode at the first use, and after the writes.
    assert [*casts.values()] == [5 if compiled else 7] * 7
    if recipe == "tensorwise" and not compiled:
        # In each microbatch one for what is prepared or fused together, else one per weight.
        of_weights = 2 * {"prepared": 2, "fused": 3, "layer by layer": 7}[how]
        assert before == [before[0]] * 4
        assert after == [before[0] - of_weights + each for each in (7, 0, 7, 0)]


@pytest.mark.parametrize("how", ["prepared", "layer by layer", "fused"])
@pytest.mark.parametrize("recipe", [*RECIPES, "rowwise", "blockwise"])
def test_parts_of_tensor_parallel_are_held_under_the_scale_of_the_whole(
    two: Ranks, recipe: str, how: str
) -> None:
    two.run(tensor_parallel, recipe, how)


@pytest.mark.parametrize(
    ("recipe", "how"),
    [("tensorwise", "prepared"), ("tensorwise", "fused"), ("delayed recipe", "layer by layer")],
)
def test_parts_of_tensor_parallel_in_compiled_code(two: Ranks, recipe: str, how: str) -> None:
    two.run(tensor_parallel, recipe, how, True)


def loaded_after_attaching(folder: str) -> None:
    """As one resumes: in place, through tensors of a state dict, which DTensors do not count."""
    outputs = []
    for weights in (Float8Weights.ON_THE_FLY, HELD):
        block = shared_block("tensorwise", "prepared", weights)
        attach_to_optimizer(block, torch.optim.AdamW(block.parameters(), foreach=True))
        state = {name: 3 * x for name, x in block.state_dict().items()}
        dcp.save(state, checkpoint_id=folder)
        dcp.load(block.state_dict(), checkpoint_id=folder)
        assert torch.equal(local_tensor(block.ffn.w1.weight), local_tensor(state["ffn.w1.weight"]))
        outputs.append(block(part(seeded(0, 2, TOKENS, DIM, device=here()), 1)))
    assert same_bits(*outputs)


def test_what_is_loaded_after_attaching_is_used(two: Ranks, tmp_path) -> None:
    two.run(loaded_after_attaching, str(tmp_path))


def refused() -> None:
    """On all ranks, before one of them asks the others."""
    for features, style, expected in (
        (1, ColwiseParallel(), r"shape \(1, 32\), to be sharded along dim 0 over 2 ranks"),
        (32, None, r"got a weight placed \(Replicate\(\),\), expected Shard\(0\) or Shard\(1\)"),
    ):
        model = nn.Sequential(nn.Linear(32, features, bias=False)).to(here())
        convert(model, "tensorwise", all_gather=False, float8_weights=HELD)
        if style is None:
            distribute_module(model, parallel_mesh())
        else:
            parallelize_module(model, parallel_mesh(), {"0": style})
        with pytest.raises(ValueError, match=expected):
            update_float8_weights(model)


def test_weights_that_ranks_cannot_share_are_refused(two: Ranks) -> None:
    two.run(refused)


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
