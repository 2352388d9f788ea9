"""Ranks train as one process does that sees all the data, however they share and use the model.

Each row of a table is a way to share or to use a model. The promise of the first table is the bits
of a model that one process trains; that of the others, of a gather in float8, is the bits of a
gather in high precision with a cast after it.
"""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from float8 import precompute_float8_dynamic_scale_for_fsdp
from support.devices import GPU
from support.models import fp8_state
from support.outcome import Results, accumulate, assert_same, evaluate, outcome
from support.ranks import on
from support.rings import short
from support.sharded import batch, fsdp1, here, keep, mesh_of, model_of, offload, shard, whole
from support.spies import Traffic

BF16, F32 = torch.bfloat16, torch.float32
Row = dict[str, Any]
"""Arguments of `outcome`."""

# ---------------------------------------------------------------- as one process alone

EXHAUSTIVE = pytest.mark.exhaustive
ALONE = [
    pytest.param(DistributedDataParallel, "tensorwise", True, F32, id="ddp, where nothing gathers"),
    pytest.param(DistributedDataParallel, "delayed", False, F32, id="ddp-delayed"),
    pytest.param(fsdp1, "delayed", False, F32, id="fsdp1-delayed"),
    pytest.param(shard, "tensorwise", True, BF16, id="fsdp2-bf16"),
    pytest.param(shard, "delayed", True, F32, id="fsdp2-delayed-fp32"),
]


@pytest.mark.parametrize(("wrap", "recipe", "gather", "dtype"), ALONE)
@on("either")
def test_two_ranks_equal_one(wrap: Any, recipe: str, gather: bool, dtype: torch.dtype) -> None:
    more: Row = {"make": partial(model_of, dtype=dtype, blocks=1), "dtype": dtype, "take": whole}
    got, alone = (outcome(recipe, gather, each, steps=3, **more) for each in (wrap, None))
    if wrap is fsdp1:  # whose gradients are flat
        got, alone = ({n: x for n, x in all.items() if "grad" not in n} for all in (got, alone))
    if wrap is shard and here().type == "cuda":
        near(got, alone, dtype)
    else:  # the sum of two gradients has no order
        assert_same(got, alone)
    if wrap is shard:
        assert_same(outcome(recipe, False, shard, steps=3, **more), got)


def near(got: Results, alone: Results, dtype: torch.dtype) -> None:
    """NCCL may round a sum otherwise, by one step of bfloat16.

    One scale for each rank's shard, instead of one for all, would be ten times as far off. Behind
    AdamW's first step one bit in a gradient becomes one in a hundred of all gradients within ten
    steps, of the loss one in a thousand.
    """
    bounds = {"loss": 1e-6, "grad": 1e-6}
    if dtype == BF16:
        bounds = {"loss 0": 1e-3, "grad 0": 2**-8, "loss": 0.01}
    for kind, most in bounds.items():
        for name in (name for name in alone if name.startswith(kind)):
            assert (got[name] - alone[name]).norm() <= most * alone[name].norm(), name


# ---------------------------------------------------------------- as with a cast after the gather


def same(recipe: str, name: str, row: Row) -> None:
    assert_same(outcome(recipe, True, **row), outcome(recipe, False, **row), name)


def masters(hidden: int = 40, mesh: tuple[int, ...] = (), **more: Any) -> Row:
    """Float32 that is gathered as bfloat16, in one block."""

    def wrap(model: nn.Module) -> nn.Module:
        return shard(model, mesh_of(*mesh), BF16, **more)

    return {"make": partial(model_of, hidden, blocks=1), "wrap": wrap, "steps": 2}


SHARDINGS: dict[str, Row] = {
    "uneven": masters(43),  # 22 and 21 rows; 11, 11, 11, 10
    "a rank has no rows": masters(1),
    "kept, powers of 2": masters(reshard_after_forward=False)
    | {"config": {"round_scales_to_power_of_2": True}},
    "without precomputed scales": masters(3) | {"attach": False},
}
OF_FOUR: dict[str, Row] = SHARDINGS | {
    "hsdp": masters(41, mesh=(2, 2)),
    "as many as ranks": masters(reshard_after_forward=4),
}


def every_sharding(recipe: str) -> None:
    for name, row in (OF_FOUR if dist.get_world_size() == 4 else SHARDINGS).items():
        same(recipe, name, row)


WHERE = {"four": EXHAUSTIVE, "two_gpus": GPU, "four_gpus": GPU}
ON_RANKS = itertools.product(["tensorwise", "delayed"], WHERE)


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [("tensorwise", "two"), *(pytest.param(*x, marks=WHERE[x[1]]) for x in ON_RANKS)],
)
def test_every_sharding(request: pytest.FixtureRequest, recipe: str, ranks: str) -> None:
    request.getfixturevalue(ranks).run(every_sharding, recipe)


@on("two")
def test_scales_of_rows_are_gathered_with_them() -> None:
    """Rows and columns of these weights are of one size: no cast of columns rounds twice."""
    alone = {"wrap": lambda model: shard(model, mesh_of(2, 1)["shard"], BF16)}
    for name, row in {
        "uneven": masters(21),
        "nothing is gathered, as beside tensor parallel": masters() | alone,
    }.items():
        same("rowwise", name, row)


# ---------------------------------------------------------------- uses of FSDP2


def freeze(model: nn.Module) -> None:
    for layer in (model[0].ffn.w1, model[0].ffn.w2):
        layer.weight.requires_grad_(False)


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def evaluate_others(model: nn.Module, last: bool) -> None:
    """Evaluate other weights, of which no history may learn."""
    before = {name: value.clone() for name, value in fp8_state(model).items()}
    for mode, factor in ((torch.no_grad(), 64.0), (torch.inference_mode(), 1 / 64)):
        with mode:
            model(batch(7, 0))
        for module in (*model, model):
            module.reshard()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
    for name, value in fp8_state(model).items():
        assert torch.equal(value, before[name]), name


def warm_up(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(7, 0))  # FSDP2's first forward is not one in inference mode


def fill(model: nn.Module) -> None:
    model.to_empty(device=here())
    values = model_of(42, blocks=1).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(values[name].chunk(2)[dist.get_rank()])


def tie(model: nn.Module) -> None:
    model[0].ffn.w3.weight = model[0].ffn.w1.weight


def shard_tied(model: nn.Module) -> nn.Module:
    model = fully_shard(model, mesh=mesh_of())
    assert model[0].ffn.w3.weight is model[0].ffn.w1.weight
    return model


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(here().type, torch.bfloat16):
        return model(x)


def without_rows(model: nn.Module, x: Tensor) -> Tensor:
    """One rank's batch is empty."""
    y = model(x[: 0 if dist.get_rank() else None])
    return nn.functional.pad(y, (0, 0, 0, x.shape[0] - y.shape[0]))


def replicated(model: nn.Module) -> nn.Module:
    """The mesh has two ranks, and each holds everything."""
    for module in (*model, model):
        replicate(module, mesh=mesh_of())
    return model


UNEVEN: Row = {"make": partial(model_of, 43, blocks=1)}
BY_COLUMNS = partial(shard, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
USES: dict[str, Row] = {
    "frozen": UNEVEN | {"edit": freeze},
    "checkpointed": {"forward": checkpointed},
    "evaluated": {"wrap": keep, "begin": evaluate},
    "evaluated between": UNEVEN
    | {"wrap": keep, "begin": warm_up, "before_backward": evaluate_others, "steps": 3},
    "from meta": {"make": partial(model_of, 42, blocks=1, device="meta"), "begin": fill},
    "tied": {"edit": tie, "wrap": shard_tied},
    "offloaded": UNEVEN | {"wrap": offload},
    "fused optimizer": UNEVEN | {"fused": True, "foreach": False},
    "clipped, all by hand": UNEVEN
    | {
        "attach": False,
        "before_step": clip,
        "after_step": precompute_float8_dynamic_scale_for_fsdp,
    },
    "sharded by columns": {"wrap": BY_COLUMNS},
    "autocast": UNEVEN | {"forward": autocast},
    "without rows": UNEVEN | {"forward": without_rows},
    "replicated": {"wrap": replicated},
}


STATEFUL = "frozen", "evaluated", "evaluated between", "tied", "without rows"
"""Where what delayed scaling records may go wrong."""
SELDOM = "fused optimizer", "clipped, all by hand", "autocast"
CASES = [("delayed" if use in STATEFUL else "tensorwise", use) for use in USES]
CASES += [("delayed", use) for use in ("checkpointed", "autocast")]
FIRST = {n for n, (_, use) in enumerate(CASES[: len(USES)]) if use not in SELDOM}


@pytest.mark.parametrize(("recipe", "use"), short(FIRST, CASES))
@on("either")
def test_use_is_as_with_a_cast_after_the_gather(recipe: str, use: str) -> None:
    one_block = {"make": partial(model_of, blocks=1)}
    same(recipe, use, {"steps": 2} | one_block | USES[use])


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("delayed", marks=EXHAUSTIVE)])
@on("either")
def test_accumulating_gathers_each_block_once_per_step(recipe: str) -> None:
    row: Row = {"wrap": keep, "microbatches": 2, "before_backward": accumulate}
    steps = 2 if recipe == "tensorwise" else 3
    with Traffic() as seen:
        same(recipe, "accumulating", row | {"steps": steps})
    assert len(seen.sizes) == 2 * steps * 2  # of two runs
