"""Gathers in float8 send half the bytes, and one all-reduce serves the scales of all weights.

A scale that was computed ahead is used for the weight that it was computed for, and no other.
"""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from float8 import precompute_float8_dynamic_scale_for_fsdp, sync_float8_amax_and_scale_history
from support.outcome import train
from support.ranks import on
from support.sharded import batch, convert, model_of, shard, whole
from support.spies import Traffic

BF16 = torch.bfloat16


def step(model: nn.Module, number: int = 0) -> Tensor:
    x = batch(number, dist.get_rank(), next(model.parameters()).dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "ffn" in name]


@on("either")
def test_half_the_bytes_of_16_bit_weights_are_gathered() -> None:
    for all_gather in (False, True):
        model = convert(model_of(dtype=BF16), "tensorwise", all_gather)
        linear = sum(p.numel() for p in weights(model))
        rest = sum(p.numel() for p in model.parameters()) - linear
        shard(model)
        step(model)
        with Traffic() as seen:
            step(model)
        assert seen.gather_dtypes == {torch.uint8 if all_gather else BF16}
        size = 1 if all_gather else 2
        # Forward and backward gather each block once; the weights of this model divide evenly.
        assert sum(seen.sizes) == 2 * (2 * rest + size * linear) // dist.get_world_size()


def all_reduces(run: Callable[..., object], *args: object) -> int:
    with Traffic() as seen:
        run(*args)
    return seen.all_reduces


@on("either")
def test_precomputing_is_one_all_reduce_and_leaves_none_to_the_forward() -> None:
    model = shard(convert(model_of(41), "tensorwise"), param_dtype=BF16)
    in_both = 2 * len(weights(model))  # in forward and in backward
    assert all_reduces(step, model) == in_both
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert all_reduces(precompute_float8_dynamic_scale_for_fsdp, model) == 1
    assert all_reduces(step, model) == 0
    optimizer.step()  # without telling
    assert all_reduces(step, model) == in_both
    for other in (  # harmless where nothing is dynamic or sharded
        convert(model_of(), "tensorwise"),
        shard(convert(model_of(), "delayed")),
        shard(model_of()),
    ):
        assert all_reduces(precompute_float8_dynamic_scale_for_fsdp, other) == 0


def tripled(model: nn.Module) -> dict[str, Tensor]:
    return {name: 3 * value for name, value in model.state_dict().items()}


WRITES: dict[str, Callable[[nn.Module, dict[str, Tensor]], object]] = {
    "foreach": lambda model, early: torch._foreach_mul_(weights(model), 3),
    "load": lambda model, early: model.load_state_dict(tripled(model)),
    "assign": lambda model, early: model.load_state_dict(tripled(model), assign=True),
    "views": lambda model, early: [w.to_local()[:1].mul_(3) for w in weights(model)],
    "data": lambda model, early: [w.data.mul_(3) for w in weights(model)],
    "early": lambda model, early: [x.detach().mul_(3) for x in early.values()],
    "state": lambda model, early: [x.to_local()[:1].mul_(3) for x in model.state_dict().values()],
}
"""Without an optimizer; `early` is a state dict from before."""


@pytest.mark.parametrize("hidden", [pytest.param(3, marks=pytest.mark.exhaustive), 42])
@on("four")
def test_a_stale_precomputed_scale_is_never_used(hidden: int) -> None:
    """Shards of 42 rows: 11, 11, 11, 9. Of 3 rows one rank has none."""
    for name, write in WRITES.items():
        results = []
        for precompute in (True, False):
            model = shard(convert(model_of(hidden, blocks=1), "tensorwise"))
            model(batch(0, dist.get_rank()))  # FSDP2 may move shards
            early = model.state_dict()
            step(model)
            if precompute:
                precompute_float8_dynamic_scale_for_fsdp(model)
            with torch.no_grad():
                write(model, early)
            model.zero_grad()
            with Traffic() as seen:
                results.append([step(model), *(whole(p.grad) for p in weights(model))])
            assert torch.uint8 in seen.gather_dtypes, name
            if precompute:  # a write moves the shards of some ranks, maybe, and all must agree
                precompute_float8_dynamic_scale_for_fsdp(model)
            results[-1].append(step(model))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), name


@on("four")
def test_when_scales_can_be_precomputed() -> None:
    for assign in (False, True):  # loading makes FSDP2 pad, and so move, uneven shards again
        model = shard(convert(model_of(42), "tensorwise"))
        step(model)
        precompute_float8_dynamic_scale_for_fsdp(model)
        model.float()
        step(model)
        model.load_state_dict(tripled(model), assign=assign)
        precompute_float8_dynamic_scale_for_fsdp(model)
        with Traffic() as seen:
            precomputed = step(model)
        assert seen.all_reduces == 0
        reference = shard(convert(model_of(42), "tensorwise"))
        reference.load_state_dict(model.state_dict())
        assert torch.equal(step(reference), precomputed)

    # Whether an empty shard was written cannot be seen, so its weight is not precomputed.
    model = shard(convert(nn.Sequential(nn.Linear(8, 5, bias=False)), "tensorwise"))  # 2, 2, 1, 0
    precompute_float8_dynamic_scale_for_fsdp(model)
    assert all_reduces(model, torch.ones(4, 8)) == 1

    # FSDP2 moves the shards of some ranks at first; all must agree that no scale is known yet.
    results = []
    for precompute in (True, False):
        model = shard(convert(model_of(42), "tensorwise"))
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        assert all_reduces(step, model) > 0
        results.append([step(model), *(whole(p.grad) for p in weights(model))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("recipe", "precompute"), [("tensorwise", True), ("tensorwise", False), ("delayed", False)]
)
@on("either")
def test_nan_on_one_rank_shows_on_all(recipe: str, precompute: bool) -> None:
    for where in ("weight", "input"):
        model = shard(convert(model_of(), recipe))
        train(model, 2)
        x = batch(0, dist.get_rank())
        with torch.no_grad():
            poisoned = model[0].ffn.w1.weight.to_local() if where == "weight" else x
            poisoned[0, 0] = -torch.nan if dist.get_rank() == 1 else poisoned[0, 0]
        if where == "weight" and precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        loss = model(x).square().mean()
        loss.backward()
        assert where == "input" or loss.isnan()
        for name, parameter in model.named_parameters():
            assert not whole(parameter.grad).isfinite().all(), name
        sync_float8_amax_and_scale_history(model)
        for name, buffer in model.named_buffers():
            assert buffer.isfinite().all(), name  # one bad step does not spoil the next


class ReducedError(Exception):
    """On which device."""


@on("two")
def test_offloaded_amaxes_are_reduced_on_the_device_of_the_mesh() -> None:
    """A mesh of another type of device than the weights and amaxes are on, as with offloading."""

    def reduce(x: Tensor, *_: object, **__: object) -> None:
        raise ReducedError(x.device.type)

    models = {recipe: shard(convert(model_of(), recipe)) for recipe in ("tensorwise", "delayed")}
    for model in models.values():
        step(model)
    with (
        mock.patch.object(DeviceMesh, "device_type", "meta"),
        mock.patch.object(dist, "all_reduce", reduce),
        mock.patch.object(torch.ops._c10d_functional, "all_reduce", reduce),
    ):
        with pytest.raises(ReducedError, match="meta"):
            precompute_float8_dynamic_scale_for_fsdp(models["tensorwise"])
        with pytest.raises(ReducedError, match="meta"):
            sync_float8_amax_and_scale_history(models["delayed"])
