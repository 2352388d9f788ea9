"""A `Float8Tensor` inside a DTensor: what styles of one's own are made of."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from float8 import Float8Tensor, Float8Weights
from float8.config import CastConfig, ScalingGranularity
from float8.quantize import Cast
from float8.tensor.float8_tensor import to_float8
from support.devices import E4M3
from support.errors import require_errors
from support.models import seeded
from support.parallel import STYLES, off, part
from support.ranks import on
from support.sharded import convert, here, mesh_of
from support.spies import Spy, Traffic


def same(a: Float8Tensor, b: Float8Tensor) -> bool:
    alike = torch.equal(a._data.view(torch.uint8), b._data.view(torch.uint8))
    return alike and torch.equal(a._scale, b._scale) and a._amax == b._amax


def by_rows(seed: int, *shape: int) -> Float8Tensor:
    spec = CastConfig(
        target_dtype=torch.float8_e4m3fn, scaling_granularity=ScalingGranularity.AXISWISE
    )
    return to_float8(seeded(seed, *shape, device=here()), Cast(spec))


def one_scale(seed: int, *shape: int) -> Float8Tensor:
    return Float8Tensor.from_high_precision(seeded(seed, *shape, device=here()))


WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


def placed(x: torch.Tensor, placement: object) -> DTensor:
    return distribute_tensor(x, mesh_of(), [placement], src_data_rank=None)


@on("either")
def test_casts_have_the_scale_of_the_whole() -> None:
    x = seeded(0, 5, 16, device=here())
    expected = Float8Tensor.from_high_precision(x)
    for placement in (WHOLE, ROWS, COLUMNS):  # 3 and 2 rows
        own = placed(x, placement).requires_grad_()
        y = Float8Tensor.from_high_precision(own)
        assert isinstance(y.to_local(), Float8Tensor)
        assert (y.shape, y.placements) == (own.shape, (placement,))
        assert same(y.full_tensor(), expected)
        y.to_local().to_original_precision().sum().backward()
        assert torch.equal(own.grad.full_tensor(), torch.ones_like(x))
        scale = torch.full_like(expected._scale, 0.5)
        given = Float8Tensor.from_high_precision(own, scale=scale).to_local()
        assert torch.equal(given._scale, scale)
    own = placed(x, ROWS)
    if dist.get_rank() == 1:
        own.to_local()[0, 0] = torch.nan
    assert bool(Float8Tensor.from_high_precision(own).to_local()._scale.isnan())
    with pytest.raises(ValueError, match="still to be summed up; redistribute"):
        Float8Tensor.from_high_precision(DTensor.from_local(x, mesh_of(), [Partial()]))


@on("either")
def test_distributing_sends_values_and_scales_of_the_first_rank() -> None:
    mesh, rank = mesh_of(), dist.get_rank()
    for rows in (6, 5):
        for placement in (WHOLE, ROWS, COLUMNS):
            expected, mine = one_scale(0, rows, 16), one_scale(rank, rows, 16)
            assert rank == 0 or not same(mine, expected)
            assert same(distribute_tensor(mine, mesh, [placement]).full_tensor(), expected)
        expected, mine = by_rows(0, rows, 16), by_rows(rank, rows, 16)
        own = distribute_tensor(mine, mesh, [ROWS])
        assert same(own.to_local(), expected.split(3)[rank])
        assert same(own.full_tensor(), expected)
        assert same(own.redistribute(placements=[WHOLE]).to_local(), expected)
        assert same(distribute_tensor(mine, mesh, [WHOLE]).to_local(), expected)


@on("two")
def test_redistributing_sends_bytes() -> None:
    x = one_scale(0, 6, 16)
    for before in (WHOLE, ROWS, COLUMNS):
        own = placed(x, before)
        for after in (WHOLE, ROWS, COLUMNS):
            with Traffic() as seen:
                moved = own.redistribute(placements=[after])
            sent = [] if before in (WHOLE, after) else [(torch.uint8, x.numel() // 2)]
            assert [entry[1:] for entry in seen.seen] == sent
            assert isinstance(moved.to_local(), Float8Tensor)
            assert same(moved.full_tensor(), x)
    assert same(placed(x[:5], ROWS).full_tensor(), x[:5])  # 3 and 2 rows


class Waitable(Spy):
    """Whether each collective of plain tensors was asked for a work to wait for.

    NCCL makes none for those that were not, and to wait for that ends the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def see(self, func: Any, args: Any) -> None:
        if func.namespace == "c10d":
            at = [argument.name for argument in func._schema.arguments].index("async_op")
            self.asked.append(len(args) <= at or args[at])


@on("either")
def test_broadcast_and_scatter_move_data_scale_and_amax() -> None:
    rank = dist.get_rank()

    def amaxed(seed: int) -> Float8Tensor:
        x = one_scale(seed, 4, 16)
        amax = torch.tensor(float(seed), device=here())
        return Float8Tensor(x._data, x._scale, x.dtype, x._granularity, amax)

    for make in (lambda seed: one_scale(seed, 4, 16), amaxed):
        x = make(rank)
        with Waitable() as works:
            dist.broadcast(x, src=1)
        assert same(x, make(1))
        assert works.asked == [True] * len(x.__tensor_flatten__()[0])
        mine = make(7)
        dist.scatter(mine, [make(2), make(3)] if rank == 0 else None, src=0)
        assert same(mine, make(2 + rank))
    finished = one_scale(rank, 4, 16)
    dist.broadcast(finished, src=0, async_op=True).wait()
    assert same(finished, one_scale(0, 4, 16))
    rows = by_rows(rank, 4, 16)
    dist.broadcast(rows, src=0)
    assert same(rows, by_rows(0, 4, 16))


@on("two")
def test_what_scales_forbid_raises() -> None:
    """Before any collective; so do all ranks, and none waits."""
    mesh, x, other = mesh_of(), one_scale(0, 8, 16), 1 - dist.get_rank()
    blocks = Float8Tensor(
        *(torch.zeros(256, 256, dtype=E4M3), torch.ones(2, 4), torch.float32),
        ScalingGranularity.BLOCK_128x128,
    )
    assert same(distribute_tensor(blocks, mesh, [WHOLE]).to_local(), blocks)
    of_rows = DTensor.from_local(by_rows(0, 8, 16), mesh, [ROWS], run_check=False)
    no_op = r"NotImplementedError: Float8Tensor: got (.)*to_original_prec"
    of_one = r"ValueError: part of a Float8Tensor to write(.)*clone\(\) it first"
    of_blocks = r"ValueError: split(.)*BLOCK_128x128, expected TENSORWISE"
    by_columns = r"ValueError: split(.)*AXISWISE, expected TENSORWISE: the result would cut"
    require_errors(
        (by_columns, distribute_tensor, [by_rows(0, 8, 16), mesh, [COLUMNS]]),
        (of_blocks, distribute_tensor, [blocks, mesh, [ROWS]]),
        (of_blocks, distribute_tensor, [blocks, mesh, [COLUMNS]]),
        ("ValueError: AXISWISE, expected TENSORWISE", of_rows.redistribute, [mesh, [COLUMNS]]),
        (no_op, dist.all_reduce, [x]),
        (no_op, dist.isend, [x, other]),
        (no_op, dist.irecv, [x, other]),
        (no_op, dist.reduce, [x, 0]),
        (no_op, dist.reduce_scatter_tensor, [one_scale(0, 4, 16), x]),
        (no_op, dist.all_gather_into_tensor, [one_scale(0, 16, 16), x]),
        (no_op, DTensor.from_local(x, mesh, [Partial()]).full_tensor, []),
        (no_op, dist.all_gather, [[one_scale(1, 8, 16), one_scale(2, 8, 16)], x]),
        (of_one, dist.broadcast, [x[:4], 0]),
    )


@pytest.mark.parametrize("kind", STYLES)
@on("either")
def test_weights_in_float8_only_are_shared(kind: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)).requires_grad_(False).to(here())
    more = {"float8_weights": Float8Weights.ONLY}
    single, model = (convert(copy.deepcopy(plain), "tensorwise", False, **more) for _ in "ab")
    colwise, rowwise, _ = STYLES[kind]
    parallelize_module(model, mesh_of(), {"0": colwise(), "1": rowwise()})
    for dim, layer in enumerate(model):
        assert isinstance(layer.weight.to_local(), Float8Tensor)
        assert same(layer.weight.to_local(), part(single[dim].weight, dim))
        assert "weight only in float8" in repr(layer)
    x, own = (seeded(1, 8, 32, device=here()).requires_grad_() for _ in "ab")
    y, own_y = single(x), model(own)
    most = 2e-2 if y.is_cuda else 1e-5  # tensor cores keep few bits of sums, and casts follow
    assert off(own_y, y) < most
    y.sum().backward()
    own_y.sum().backward()
    assert off(own.grad, x.grad) < most
    rows = convert(copy.deepcopy(plain), "rowwise", False, **more)
    if kind == "float8":
        with pytest.raises(ValueError, match=r"ONLY whose weight has (.)*AXISWISE scales"):
            parallelize_module(rows, mesh_of(), {"1": rowwise()})


@on("two")
def test_products_that_dtensor_shards_by_itself() -> None:
    x, w, bias = one_scale(1, 16, 32), one_scale(2, 48, 32), seeded(3, 48)
    wide = w.to_original_precision()
    for of_x, of_w, of_y in (
        (WHOLE, ROWS, COLUMNS),
        (ROWS, WHOLE, ROWS),
        (COLUMNS, COLUMNS, Partial()),
    ):
        for weight, wanted in ((w, x @ w.t()), (wide, x.to_original_precision() @ wide.t())):
            y = placed(x, of_x) @ placed(weight, of_w).t()
            assert y.placements == (of_y,)
            assert off(y.full_tensor(), wanted) < 1e-6
    y = torch.addmm(placed(bias, ROWS), placed(x, WHOLE), placed(w, ROWS).t())
    assert off(y.full_tensor(), torch.addmm(bias, x, w.t())) < 1e-6
    y = torch.nn.functional.linear(placed(x, WHOLE).view(2, 8, 32), placed(w, ROWS))
    assert y.placements == (Shard(2),)
    assert off(y.full_tensor(), (x @ w.t()).view(2, 8, 48)) < 1e-6
