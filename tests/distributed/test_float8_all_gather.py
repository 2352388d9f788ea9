"""What FSDP2 gathers in float8: bytes and scales of one device, half the traffic, scales ahead.

A scale that was computed ahead is used for the weight that it was computed for, and no other.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from float8 import linear, sync_float8_amax_and_scale_history
from float8 import precompute_float8_dynamic_scale_for_fsdp as precompute_scales
from float8.fsdp.gather import Float8GatherWeight
from float8.tensor import Float8Tensor
from sqnr import same_bits, sqnr
from support.configs import of_recipe
from support.models import seeded
from support.outcome import train
from support.ranks import Ranks, on
from support.sharded import batch, convert, here, mesh_of, model_of, shard, whole
from support.spies import Traffic

K = 144


def one_layer(recipe: str, N: int) -> None:
    """The gathered weight is that of one device: scales and bytes, and so is the output."""
    torch.manual_seed(0)
    plain = nn.Linear(K, N, bias=False, dtype=torch.bfloat16).to(here())
    plain.weight.data *= torch.logspace(-2, 2, N, device=here()).unsqueeze(1)
    layer = convert(nn.Sequential(copy.deepcopy(plain)), recipe)[0]
    fully_shard(layer, mesh=mesh_of())
    x = seeded(1, 48, K, dtype=torch.bfloat16, device=here())
    alone, leaf = (x.clone().requires_grad_() for _ in range(2))
    wanted = linear(alone, plain.weight, config=of_recipe(recipe))
    with Traffic() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = layer(leaf)
    said = [str(w.message) for w in caught if "float8: a weight" in str(w.message)]
    rows = -(-N // dist.get_world_size())
    even = rows * dist.get_world_size() == N
    in_float8 = even and (recipe == "rowwise" or rows % 128 == 0)
    assert isinstance(layer.weight, Float8Tensor) == in_float8
    assert same_bits(y, wanted)
    if in_float8:
        assert not said
        assert seen.all_reduces == 0
        scales = rows * 4 if recipe == "rowwise" else rows // 128 * 4 * 4
        assert seen.sizes == [rows * K + scales]  # in the same collective
    else:
        reason = "would cut ScalingGranularity.BLOCK_128x128" if even else "are not all of one size"
        assert reason in said[0]
    grad = seeded(2, 48, N, dtype=torch.bfloat16, device=here())
    wanted.backward(grad)
    y.backward(grad)
    assert same_bits(whole(layer.weight.grad), plain.weight.grad)
    if recipe == "rowwise" and in_float8:
        # Columns are cast again from rows. Powers of two as scales: few bits of few values go.
        assert sqnr(alone.grad, leaf.grad) > 35
    else:
        assert same_bits(alone.grad, leaf.grad)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_one_layer(either: Ranks, recipe: str) -> None:
    for N in (256, 33, 130, 128):
        either.run(one_layer, recipe, N)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_ranks_without_rows(two_or_four: Ranks, recipe: str) -> None:
    two_or_four.run(one_layer, recipe, two_or_four.size - 1)


class Absorbs(nn.Module):
    """Reads a weight by other ops than that of its layer, as some attention does."""

    def __init__(self, read: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.up = read, nn.Linear(K, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight, y = self.up.weight, self.up(x).sum()
        if self.read == "einsum":
            return y + torch.einsum("td,hvd->thv", x, weight.view(4, 16, K)).sum()
        if self.read == "bmm":
            return y + torch.bmm(x[None], weight.t()[None]).sum()
        return y + weight.pow(2).sum()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on("either")
def test_a_weight_that_a_forward_reads_itself(recipe: str) -> None:
    """Products warn; other ops name a way that has the gradients of one without float8."""
    x = seeded(0, 16, K, device=here())
    for read in ("einsum", "pow", "bmm"):
        models = []
        for gathers in ((True,), (True, False), (False,)):
            models.append(Absorbs(read).to(here()))
            for gather in gathers:
                convert(models[-1], recipe, gather)
            fully_shard(models[-1], mesh=mesh_of())
        gathered, *others = models
        does = pytest.warns(UserWarning, match="or have its weight gathered in high precision")
        if read == "pow":
            does = pytest.raises(NotImplementedError, match="its layer again before fully_shard")
        with does:
            gathered(x).backward()
        for model in others:
            model(x).backward()
        assert torch.equal(*(whole(model.up.weight.grad) for model in others))


# ---------------------------------------------------------------- scales ahead

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
        model = convert(model_of(dtype=BF16, blocks=1), "tensorwise", all_gather)
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
    model = shard(convert(model_of(41, blocks=1), "tensorwise"), param_dtype=BF16)
    in_both = 2 * len(weights(model))  # in forward and in backward
    assert all_reduces(step, model) == in_both
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert all_reduces(precompute_scales, model) == 1
    assert all_reduces(step, model) == 0
    optimizer.step()  # without telling
    assert all_reduces(step, model) == in_both
    precompute_scales(model)
    key = Float8GatherWeight._versions
    with mock.patch.object(Float8GatherWeight, "_versions", lambda *args: (*key(*args)[:-1], 7)):
        with pytest.warns(UserWarning, match="in this CUDA graph casts its weight"):
            assert all_reduces(step, model) == in_both  # casts from before a capture
        precompute_scales(model)
        assert all_reduces(step, model) == 0
    for other in (  # harmless where nothing is dynamic or sharded
        convert(model_of(), "tensorwise"),
        shard(convert(model_of(), "delayed")),
        shard(model_of()),
    ):
        assert all_reduces(precompute_scales, other) == 0


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


def stale(hidden: int) -> None:
    for name, write in WRITES.items():
        results = []
        for precompute in (True, False):
            model = shard(convert(model_of(hidden, blocks=1), "tensorwise"))
            step(model)  # FSDP2 may move shards
            early = model.state_dict()
            if precompute:
                precompute_scales(model)
            with torch.no_grad():
                write(model, early)
            model.zero_grad()
            with Traffic() as seen:
                results.append([step(model), *(whole(p.grad) for p in weights(model))])
            assert torch.uint8 in seen.gather_dtypes, name
            if precompute:  # a write moves the shards of some ranks, maybe, and all must agree
                precompute_scales(model)
            results[-1].append(step(model))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), name


@pytest.mark.parametrize(
    ("ranks", "hidden"),  # shards of 22 and 21 rows; one rank has none
    [("two", 43), pytest.param("four", 3, marks=pytest.mark.exhaustive)],
)
def test_a_stale_precomputed_scale_is_never_used(request: Any, ranks: str, hidden: int) -> None:
    request.getfixturevalue(ranks).run(stale, hidden)


@on("two")
def test_when_scales_can_be_precomputed() -> None:
    for assign in (False, True):  # loading makes FSDP2 pad, and so move, uneven shards again
        model = shard(convert(model_of(43, blocks=1), "tensorwise"))
        step(model)
        precompute_scales(model)
        model.float()
        step(model)
        model.load_state_dict(tripled(model), assign=assign)
        precompute_scales(model)
        with Traffic() as seen:
            precomputed = step(model)
        assert seen.all_reduces == 0
        reference = shard(convert(model_of(43, blocks=1), "tensorwise"))
        reference.load_state_dict(model.state_dict())
        assert torch.equal(step(reference), precomputed)

    # Whether an empty shard was written cannot be seen, so its weight is not precomputed.
    model = shard(convert(nn.Sequential(nn.Linear(8, 1, bias=False)), "tensorwise"))
    precompute_scales(model)
    assert all_reduces(model, torch.ones(4, 8)) == 1

    # FSDP2 moves the shards of some ranks at first; all must agree that no scale is known yet.
    results = []
    for precompute in (True, False):
        model = shard(convert(model_of(43, blocks=1), "tensorwise"))
        if precompute:
            precompute_scales(model)
        assert all_reduces(step, model) > 0
        results.append([step(model), *(whole(p.grad) for p in weights(model))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("recipe", "precompute"),
    [
        ("tensorwise", True),
        pytest.param("tensorwise", False, marks=pytest.mark.exhaustive),
        ("delayed", False),
    ],
)
@on("either")
def test_nan_on_one_rank_shows_on_all(recipe: str, precompute: bool) -> None:
    for where in ("weight", "input"):
        model = shard(convert(model_of(blocks=1), recipe))
        train(model, 2)
        x = batch(0, dist.get_rank())
        with torch.no_grad():
            poisoned = model[0].ffn.w1.weight.to_local() if where == "weight" else x
            poisoned[0, 0] = -torch.nan if dist.get_rank() == 1 else poisoned[0, 0]
        if where == "weight" and precompute:
            precompute_scales(model)
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
            precompute_scales(models["tensorwise"])
        with pytest.raises(ReducedError, match="meta"):
            sync_float8_amax_and_scale_history(models["delayed"])
