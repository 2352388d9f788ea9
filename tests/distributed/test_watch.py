"""`Watch` and `numerics_report` of models that ranks share: the numbers of one process, on all."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from float8 import Float8ColwiseParallel, Watch, all_linears, convert_to_float8_training
from float8_lab.numerics import numerics_report
from support.experts import Experts
from support.models import seeded
from support.outcome import train
from support.parallel import DIM, TOKENS, block_of, plan_of
from support.ranks import on
from support.sharded import batch, convert, data_and_tensor, here, mesh_of, model_of, shard

Seen = dict[str, float]


def seen_in_training(model: nn.Module, **how: Any) -> tuple[list[Seen], Any]:
    """Of four steps, every other one watched; and what came of them."""
    watch, found = Watch(model, 2), list[Seen]()
    results = train(model, after_step=lambda _: found.append(watch.step()), **how)
    assert [bool(seen) for seen in found] == [False, True, False, True]
    return found[1::2], results


def same_on_all_ranks(seen: Any) -> None:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    assert all(each == every[0] for each in every)


EXHAUSTIVE = pytest.mark.exhaustive
one_block = partial(model_of, blocks=1)


@pytest.mark.parametrize(
    ("wrap", "recipe"),
    [
        pytest.param(DistributedDataParallel, "tensorwise", marks=EXHAUSTIVE),
        (shard, "delayed"),
        pytest.param(shard, "blockwise", marks=EXHAUSTIVE),
    ],
)
@on("two")
def test_ranks_see_what_one_process_sees(wrap: Any, recipe: str) -> None:
    found, results = seen_in_training(wrap(convert(one_block(), recipe, False)))
    same_on_all_ranks(found)
    unwatched = train(wrap(convert(one_block(), recipe, False)))
    assert all(torch.equal(x, unwatched[name]) for name, x in results.items())
    alone, _ = seen_in_training(convert(one_block(), recipe, False), alone=True)
    assert [each.keys() for each in found] == [each.keys() for each in alone]
    for seen, wanted in zip(found, alone, strict=True):
        off = {key for key in seen if seen[key] != pytest.approx(wanted[key], rel=1e-4, abs=1e-9)}
        assert not off, {key: (seen[key], wanted[key]) for key in off}
    assert len(found[0]) == 3 * 3 * 4


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("delayed", marks=EXHAUSTIVE)])
@on("two")
def test_weights_gathered_in_float8(recipe: str) -> None:
    """Or, of float32, as bfloat16."""
    bf16 = partial(shard, param_dtype=torch.bfloat16)
    found, results = seen_in_training(bf16(convert(one_block(), recipe, True)))
    same_on_all_ranks(found)
    plain, unwatched = seen_in_training(bf16(convert(one_block(), recipe, False)))
    assert all(torch.equal(x, unwatched[name]) for name, x in results.items())
    for seen, wanted in zip(found, plain, strict=True):
        for key, value in wanted.items():
            if recipe != "delayed" or "weight" not in key:  # they are cut before they get there
                assert seen[key] == pytest.approx(value, rel=1e-5), key


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("float8", "delayed"),
        pytest.param("float8", "rowwise", marks=EXHAUSTIVE),
        pytest.param("torch", "tensorwise", marks=EXHAUSTIVE),
    ],
)
@on("two")
def test_tensor_parallel(kind: str, recipe: str) -> None:
    single, model = block_of(recipe), block_of(recipe)
    parallelize_module(model, mesh_of(), plan_of(kind, sequence=True))
    x, g = (seeded(seed, 2, TOKENS, DIM, device=here()) for seed in (1, 2))
    x[..., 3:9] *= 1e-6
    with Watch(single, 1) as watch:
        single(x).backward(g)
        wanted = watch.step()
    mine = [each.chunk(2, 1)[dist.get_rank()] for each in (x, g)]
    with Watch(model, 1) as watch:
        model(mine[0]).backward(mine[1])
        seen = watch.step()
    same_on_all_ranks(seen)
    assert seen.keys() == wanted.keys()
    assert max(wanted[key] for key in wanted if "underflow" in key) > 0.01
    for key, value in wanted.items():
        # Inputs may be in float8 before they get there.
        rel, off = (0.07, 0.02) if kind == "float8" and "/input/" in key else (1e-3, 2e-3)
        assert seen[key] == pytest.approx(value, rel=rel, abs=off), key


@EXHAUSTIVE
@on("two_or_four")
def test_fsdp2_with_tensor_parallel() -> None:
    mesh = data_and_tensor(dist.get_world_size() // 2, 2)
    single, model = block_of("tensorwise"), block_of("tensorwise")
    parallelize_module(model, mesh["tensor"], plan_of("float8", sequence=False))
    shard(model, mesh["data"])
    batches = [seeded(seed, 2, TOKENS, DIM) for seed in range(mesh["data"].size())]
    with Watch(single, 1) as watch:
        for x in batches:
            single(x).sum().backward()
        wanted = watch.step()
    with Watch(model, 1) as watch:
        model(batches[mesh.get_local_rank("data")]).sum().backward()
        seen = watch.step()
    same_on_all_ranks(seen)
    assert seen == pytest.approx(wanted, rel=1e-3, abs=2e-3)


@on("two")
def test_an_inf_in_one_shard_is_found_on_all_ranks() -> None:
    model = shard(convert(one_block(), "tensorwise", False))
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].ffn.w2.weight.to_local()[0, 0] = math.inf
    with Watch(model, 1) as watch:
        model(batch(0, dist.get_rank())).sum().backward()
        seen = watch.step()
    same_on_all_ranks({key: str(x) for key, x in seen.items()})
    bad = [key for key, x in seen.items() if key.endswith("nonfinite") and x > 0]
    assert [key for key in bad if "grad_output" not in key] == ["0.ffn.w2/weight/nonfinite"]
    assert seen["0.ffn.w2/weight/nonfinite"] == 1 / (24 * 40)
    assert "0.ffn.w1/grad_output/nonfinite" in bad


@on("two")
def test_an_input_that_is_a_sum_still_to_be_made() -> None:
    model = convert(nn.Sequential(nn.Linear(32, 48)), "tensorwise", False)
    parallelize_module(model, mesh_of(), {"0": Float8ColwiseParallel(input_layouts=Shard(1))})
    x = seeded(1, 2, 8, 32)
    summands = DTensor.from_local(x * (3, -2)[dist.get_rank()], mesh_of(), [Partial()])
    with Watch(model, 1) as watch:
        model(summands.requires_grad_()).sum().backward()
        assert watch.step()["0/input/amax"] == pytest.approx(x.abs().max().item())


@on("two")
def test_experts_of_ranks_some_of_which_get_no_tokens() -> None:
    x, offs = seeded(2, 24, 32), torch.tensor([8, 24, 24], dtype=torch.int32)
    x[8:] *= 1e3
    found = []
    for shared in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"experts": Experts()})
        convert_to_float8_training(model, config="tensorwise", module_filter_fn=all_linears)
        experts, part = model["experts"], (x, offs)
        if shared:
            for name, weight in list(experts.named_parameters()):
                placed = distribute_tensor(weight, mesh_of(), [Shard(0)])
                setattr(experts, name, nn.Parameter(placed))
            part = (x, offs[:2]) if dist.get_rank() == 0 else (x[:0], offs[2:] - 24)
        with Watch(model, 1) as watch:
            experts(*part).sum().backward()
            found.append(watch.step())
    same_on_all_ranks(found)
    assert found[0] == found[1]
    assert len(found[0]) == 2 * 3 * 4


@on("two")
def test_different_layers_need_a_group() -> None:
    model = convert(model_of(blocks=1 + dist.get_rank()), "tensorwise", False)
    own, _ = dist.new_subgroups(1)
    for group in (own, None):
        with Watch(model, 1, group=group) as watch:
            model(batch(0, 0)).sum().backward()
            if group is None:
                with pytest.raises(ValueError, match="got other layers than on other ranks"):
                    watch.step()
            else:
                assert len(watch.step()) == (1 + dist.get_rank()) * 3 * 3 * 4


@pytest.mark.parametrize("recipe", [pytest.param("delayed", marks=EXHAUSTIVE), "rowwise"])
@on("two")
def test_a_report_of_a_sharded_model(recipe: str) -> None:
    """Is that of the whole one, if ranks have the same batch; and all is left as it was."""

    def report(model: nn.Module, seed: int) -> Any:
        return numerics_report(model, batch(seed, 0), loss=lambda y: y.square().mean())

    single, model = one_block(), shard(convert(one_block(), recipe, False))
    told = str(report(model, 0))
    assert told == str(report(convert(single, recipe, False), 0))
    found = train(model, 2, after_step=lambda model: report(model, 1))
    unwatched = train(shard(convert(one_block(), recipe, False)), 2)
    assert all(torch.equal(x, unwatched[name]) for name, x in found.items())
    every = report(model, dist.get_rank()).casts  # of both batches
    same_on_all_ranks([(cast.layer, cast.sqnr_db) for cast in every])
    gathered = report(shard(convert(one_block(), recipe, True)), 0)
    assert {cast.role for cast in gathered.casts} == {"input", "grad_output"}


@on("two")
def test_a_report_under_tensor_parallel() -> None:
    single, model = block_of("tensorwise"), block_of("tensorwise")
    parallelize_module(model, mesh_of(), plan_of("torch", sequence=False))
    x, loss = seeded(1, 2, TOKENS, DIM, device=here()), lambda y: y.square().mean()
    told, wanted = (numerics_report(each, x, loss=loss) for each in (model, single))
    same_on_all_ranks(str(told))
    of_single = {(cast.layer, cast.role): cast for cast in wanted.casts}
    assert len(told.casts) == len(of_single) == 7 * 3
    for cast in told.casts:
        other = of_single[cast.layer, cast.role]
        assert cast.sqnr_db == pytest.approx(other.sqnr_db, abs=0.3)
        assert cast.amax == pytest.approx(other.amax, rel=1e-3)
        assert cast.gemms == other.gemms
