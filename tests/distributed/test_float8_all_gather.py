"""FSDP2 with float8 all-gather computes what FSDP2 with a cast after the gather does, bitwise."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.configs import RECIPES
from support.ranks import Ranks
from support.sharded import Run, convert, here, mesh_of, model_of, shard, train, train_alone

BF16, F32 = torch.bfloat16, torch.float32

DTYPES = [
    pytest.param(BF16, None, id="bf16"),
    pytest.param(F32, None, id="fp32"),
    pytest.param(F32, BF16, id="fp32-masters"),
]


def same_as_cast_after_gather(
    recipe: str, dtype: torch.dtype, param_dtype: torch.dtype | None, alone: bool, attach: bool
) -> None:
    runs = []
    for all_gather in (False, True):
        model = shard(convert(model_of(dtype=dtype), recipe, all_gather), param_dtype=param_dtype)
        runs.append(train(model, dtype=dtype, attach=attach, full=alone))
    runs[0].assert_equal(runs[1])
    if not alone:
        return
    single = train_alone(convert(model_of(dtype=dtype), recipe), dtype=dtype)
    if here().type == "cpu":
        # The sum of two gradients has no order: bitwise, too.
        runs[1].assert_equal(single)
    elif dtype == F32:
        runs[1].assert_close(single, loss=1e-6, grad=1e-6)
    else:
        # NCCL may round a sum otherwise, by one step of bfloat16. One scale for each rank's shard,
        # instead of one for all, would be ten times as far off. Behind AdamW's first step one bit
        # in a gradient becomes one in a hundred of all gradients within ten steps, of the loss
        # one in a thousand.
        Run(runs[1].losses[:1], runs[1].grads[:1]).assert_close(
            Run(single.losses[:1], single.grads[:1]), loss=1e-3, grad=2**-8
        )
        for mine, theirs in zip(runs[1].losses, single.losses, strict=True):
            assert (mine - theirs).abs() <= 0.01 * theirs


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("dtype", "param_dtype"), DTYPES)
def test_two_ranks_equal_one(
    either: Ranks, recipe: str, dtype: torch.dtype, param_dtype: torch.dtype | None
) -> None:
    either.run(same_as_cast_after_gather, recipe, dtype, param_dtype, param_dtype is None, True)


def test_without_precomputed_scales(two: Ranks) -> None:
    two.run(same_as_cast_after_gather, "tensorwise", F32, BF16, False, False)


SHARDINGS: dict[str, dict[str, Any]] = {
    "uneven": {"hidden": 42},  # 11, 11, 11, 9 rows
    "empty": {"hidden": 3},
    "empty-of-two": {"hidden": 1},
    "hsdp": {"hidden": 41, "mesh": (2, 2)},
    "keep": {"reshard_after_forward": False},
    "as-many-as-ranks": {"reshard_after_forward": 4},
    "powers of 2": {"power_of_2": True},
}
NEED_FOUR = ["hsdp", "as-many-as-ranks"]


def every_sharding(recipe: str) -> None:
    for name, options in SHARDINGS.items():
        if name in NEED_FOUR and dist.get_world_size() < 4:
            continue
        more = dict(options)
        model = functools.partial(model_of, more.pop("hidden", 40), F32)
        more["mesh"] = mesh_of(*more.pop("mesh", ()))
        config = {"round_scales_to_power_of_2": more.pop("power_of_2", False)}
        runs = []
        for all_gather in (False, True):
            converted = convert(model(), recipe, all_gather, **config)
            runs.append(train(shard(converted, param_dtype=BF16, **more), 2))
        try:
            runs[0].assert_equal(runs[1])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize(
    "recipe", ["tensorwise", pytest.param("delayed", marks=pytest.mark.exhaustive)]
)
def test_every_sharding(four: Ranks, recipe: str) -> None:
    four.run(every_sharding, recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", ["two_gpus", "four_gpus"])
def test_every_sharding_on_gpus(request: pytest.FixtureRequest, recipe: str, ranks: str) -> None:
    request.getfixturevalue(ranks).run(every_sharding, recipe)
