"""A `Float8Tensor` inside a DTensor: what styles of one's own are made of."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import Float8Tensor, Float8Weights
from float8.config import CastConfig, ScalingGranularity
from float8.quantize import Cast
from float8.tensor.float8_tensor import to_float8
from support.models import seeded
from support.parallel import STYLES, off, part
from support.ranks import Ranks, on
from support.sharded import Traffic, convert, here, mesh_of


def redistributed() -> None:
    mesh = mesh_of()
    x = Float8Tensor.from_high_precision(seeded(0, 6, 16, device=here()))
    expected = x.to_original_precision()
    whole, rows, columns = Replicate(), Shard(0), Shard(1)
    for before in (whole, rows, columns):
        placed = distribute_tensor(x, mesh, [before], src_data_rank=None)
        for after in (whole, rows, columns):
            with Traffic() as seen:
                moved = placed.redistribute(placements=[after])
            sent = [] if before in (whole, after) else [(torch.uint8, x.numel() // 2)]
            assert [entry[1:] for entry in seen.seen] == sent
            assert isinstance(moved.to_local(), Float8Tensor)
            assert torch.equal(moved.full_tensor().to_original_precision(), expected)
    uneven = x[:5]  # 3 and 2 rows
    gathered = distribute_tensor(uneven, mesh, [rows], src_data_rank=None).full_tensor()
    assert torch.equal(gathered.to_original_precision(), expected[:5])


def cast_whole() -> None:
    mesh = mesh_of()
    x = seeded(0, 5, 16, device=here())
    expected = Float8Tensor.from_high_precision(x)
    for placement in (Replicate(), Shard(0), Shard(1)):  # 3 and 2 rows
        own = distribute_tensor(x, mesh, [placement]).requires_grad_()
        y = Float8Tensor.from_high_precision(own)
        assert isinstance(y.to_local(), Float8Tensor)
        assert (y.shape, y.placements) == (own.shape, (placement,))
        whole = y.full_tensor()
        assert torch.equal(whole._scale, expected._scale)
        assert torch.equal(whole.to_original_precision(), expected.to_original_precision())
        y.to_local().to_original_precision().sum().backward()
        assert torch.equal(own.grad.full_tensor(), torch.ones_like(x))
        scale = torch.full_like(expected._scale, 0.5)
        given = Float8Tensor.from_high_precision(own, scale=scale).to_local()
        assert torch.equal(given._scale, scale)
    own = distribute_tensor(x, mesh, [Shard(0)])
    if dist.get_rank() == 1:
        own.to_local()[0, 0] = torch.nan
    assert bool(Float8Tensor.from_high_precision(own).to_local()._scale.isnan())
    with pytest.raises(ValueError, match="still to be summed up; redistribute"):
        Float8Tensor.from_high_precision(DTensor.from_local(x, mesh, [Partial()]))


def own_style() -> None:
    """A layer takes the bytes that somebody else cast and gathered."""
    mesh, results = mesh_of(), []
    x = seeded(1, 8, 32, device=here())
    for parallel in (False, True):
        torch.manual_seed(0)
        layer = convert(torch.nn.Linear(32, 48, bias=False).to(here()), "tensorwise", False)
        own = x.clone().requires_grad_()
        y = Float8Tensor.from_high_precision(own)
        if parallel:
            weight = distribute_tensor(layer.weight.detach(), mesh, [Shard(0)])
            layer.weight = torch.nn.Parameter(weight)
            y = DTensor.from_local(y, mesh, [Replicate()], run_check=False)
        y = layer(y)
        y = y.redistribute(placements=[Replicate()]).to_local() if parallel else y
        y.backward(torch.ones_like(y))
        grad = layer.weight.grad
        results.append([y, own.grad, grad.full_tensor() if parallel else grad])
    for got, expected in zip(*results, strict=True):
        assert off(got, expected) < 1e-5


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


def distributed() -> None:
    """Values and scales are those of the first rank, as of other tensors."""
    mesh, rank = mesh_of(), dist.get_rank()
    for rows in (6, 5):
        for placement in (Replicate(), Shard(0), Shard(1)):
            expected, mine = one_scale(0, rows, 16), one_scale(rank, rows, 16)
            assert rank == 0 or not same(mine, expected)
            assert same(distribute_tensor(mine, mesh, [placement]).full_tensor(), expected)
        expected, mine = by_rows(0, rows, 16), by_rows(rank, rows, 16)
        placed = distribute_tensor(mine, mesh, [Shard(0)])
        assert same(placed.to_local(), expected.split(3)[rank])
        assert same(placed.full_tensor(), expected)
        assert same(placed.redistribute(placements=[Replicate()]).to_local(), expected)
        assert same(distribute_tensor(mine, mesh, [Replicate()]).to_local(), expected)


class Waitable(TorchDispatchMode):
    """Whether each collective of plain tensors was asked for a work to wait for.

    NCCL makes none for those that were not, and to wait for that ends the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, Float8Tensor) for kind in types):
            return NotImplemented  # it will call what it is made of
        if func.namespace == "c10d":
            at = [argument.name for argument in func._schema.arguments].index("async_op")
            self.asked.append(len(args) <= at or args[at])
        return func(*args, **kwargs or {})


def moved() -> None:
    """Whole tensors, each with its own scale and amax to record."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()

    def of(seed: int) -> Float8Tensor:
        return one_scale(seed, 4, 16)

    def amaxed(seed: int) -> Float8Tensor:
        x = one_scale(seed, 4, 16)
        amax = torch.tensor(float(seed), device=here())
        return Float8Tensor(x._data, x._scale, x.dtype, x._granularity, amax)

    for make in (of, amaxed):
        x = make(rank)
        with Waitable() as works:
            dist.broadcast(x, src=1)
        assert same(x, make(1))
        assert works.asked == [True] * len(x.__tensor_flatten__()[0])
        both = [make(7), make(8)]
        dist.all_gather(both, make(rank))
        assert all(same(got, make(n)) for n, got in enumerate(both))
        mine = make(7)
        dist.scatter(mine, [make(2), make(3)] if rank == 0 else None, src=0)
        assert same(mine, make(2 + rank))
        gathered = [make(7), make(8)] if rank == 0 else None
        dist.gather(make(rank), gathered, dst=0)
        assert gathered is None or all(same(got, make(n)) for n, got in enumerate(gathered))
        if here().type == "cuda":  # Gloo has none of lists in every version
            received = [make(7), make(8)]
            dist.all_to_all(received, [make(10 * rank), make(10 * rank + 1)])
            assert all(same(got, make(10 * n + rank)) for n, got in enumerate(received))
    finished = one_scale(rank, 4, 16)
    dist.broadcast(finished, src=0, async_op=True).wait()
    assert same(finished, one_scale(0, 4, 16))
    rows = [by_rows(8, 4, 16), by_rows(9, 4, 16)]
    dist.all_gather(rows, by_rows(rank, 4, 16))
    assert same(rows[other], by_rows(other, 4, 16))


def test_casts_and_collectives(either: Ranks) -> None:
    either.run(cast_whole)
    either.run(distributed)
    either.run(moved)


@on("two")
def test_what_scales_forbid_raises() -> None:
    """Before any collective; so do all ranks, and none waits."""
    mesh, x = mesh_of(), one_scale(0, 8, 16)
    plain = x.to_original_precision()
    with pytest.raises(ValueError, match=r"split(.)*AXISWISE, expected TENSORWISE: a part of"):
        distribute_tensor(by_rows(0, 8, 16), mesh, [Shard(1)])
    scale = torch.ones(2, 4, device=here())
    blocks = Float8Tensor(
        torch.zeros(256, 256, dtype=torch.float8_e4m3fn, device=here()),
        scale,
        torch.float32,
        ScalingGranularity.BLOCK_128x128,
    )
    for dim in (0, 1):
        with pytest.raises(ValueError, match=r"split(.)*BLOCK_128x128, expected TENSORWISE"):
            distribute_tensor(blocks, mesh, [Shard(dim)])
    assert same(distribute_tensor(blocks, mesh, [Replicate()]).to_local(), blocks)
    placed = DTensor.from_local(by_rows(0, 8, 16), mesh, [Shard(0)], run_check=False)
    with pytest.raises(ValueError, match="AXISWISE, expected TENSORWISE"):
        placed.redistribute(placements=[Shard(1)])
    for call in (
        lambda: dist.all_reduce(x),
        lambda: dist.isend(x, 1 - dist.get_rank()),
        lambda: dist.irecv(x, 1 - dist.get_rank()),
        lambda: dist.reduce(x, 0),
        lambda: dist.reduce_scatter_tensor(one_scale(0, 4, 16), x),
        lambda: dist.all_gather_into_tensor(one_scale(0, 16, 16), x),
        lambda: DTensor.from_local(x, mesh, [Partial()]).full_tensor(),
    ):
        with pytest.raises(NotImplementedError, match=r"Float8Tensor: got (.)*to_original_prec"):
            call()
    with pytest.raises(ValueError, match="got a Float8Tensor and a high-precision tensor"):
        dist.all_gather([plain.clone(), plain.clone()], x)
    for parts in (list(one_scale(0, 8, 16).split(4)), [x[:4], one_scale(0, 4, 16)]):
        with pytest.raises(ValueError, match=r"parts of a Float8Tensor(.)*clone\(\) them first"):
            dist.all_gather(parts, one_scale(0, 4, 16))


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


def strategies() -> None:
    """Products that DTensor shards by itself: with bias, of three dims, with high precision."""
    mesh, x, w = mesh_of(), one_scale(1, 16, 32), one_scale(2, 48, 32)
    bias = seeded(3, 48, device=here())
    wide = w.to_original_precision()

    def on(t: torch.Tensor, placement: object) -> DTensor:
        return distribute_tensor(t, mesh, [placement])

    for of_x, of_w, of_y in (
        (Replicate(), Shard(0), Shard(1)),
        (Shard(0), Replicate(), Shard(0)),
        (Shard(1), Shard(1), Partial()),
    ):
        y = on(x, of_x) @ on(w, of_w).t()
        assert y.placements == (of_y,)
        assert off(y.full_tensor(), x @ w.t()) < 1e-6
        y = on(x, of_x) @ on(wide, of_w).t()
        assert y.placements == (of_y,)
        assert off(y.full_tensor(), x.to_original_precision() @ wide.t()) < 1e-6
    y = torch.addmm(on(bias, Shard(0)), on(x, Replicate()), on(w, Shard(0)).t())
    assert off(y.full_tensor(), torch.addmm(bias, x, w.t())) < 1e-6
    tall = on(x, Replicate()).view(2, 8, 32)
    y = torch.nn.functional.linear(tall, on(w, Shard(0)))
    assert y.placements == (Shard(2),)
    assert off(y.full_tensor(), (x @ w.t()).view(2, 8, 48)) < 1e-6


def test_what_styles_are_made_of(two: Ranks) -> None:
    two.run(redistributed)
    two.run(strategies)
    two.run(own_style)
