"""A `Float8Tensor` inside a DTensor: what styles of one's own are made of."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from float8 import Float8Tensor
from support.models import seeded
from support.parallel import mesh_of, off
from support.ranks import Ranks
from support.sharded import FunctionalTraffic, convert, here


def redistributed() -> None:
    mesh = mesh_of()
    x = Float8Tensor.from_high_precision(seeded(0, 6, 16, device=here()))
    expected = x.to_original_precision()
    whole, rows, columns = Replicate(), Shard(0), Shard(1)
    for before in (whole, rows, columns):
        placed = distribute_tensor(x, mesh, [before], src_data_rank=None)
        for after in (whole, rows, columns):
            with FunctionalTraffic() as seen:
                moved = placed.redistribute(placements=[after])
            sent = [] if before in (whole, after) else [(torch.uint8, x.numel() // 2)]
            assert [entry[1:] for entry in seen.seen] == sent
            assert isinstance(moved.to_local(), Float8Tensor)
            assert torch.equal(moved.full_tensor().to_original_precision(), expected)
    uneven = x[:5]  # 3 and 2 rows
    gathered = distribute_tensor(uneven, mesh, [rows], src_data_rank=None).full_tensor()
    assert torch.equal(gathered.to_original_precision(), expected[:5])


def test_redistributing_sends_bytes(two: Ranks) -> None:
    two.run(redistributed)


def multiplied() -> None:
    mesh = mesh_of()
    x, w = (
        Float8Tensor.from_high_precision(seeded(seed, 16, 32, device=here())) for seed in (1, 2)
    )
    for placements in ((Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(1), Shard(1))):
        a, b = (
            distribute_tensor(t, mesh, [placement], src_data_rank=None)
            for t, placement in zip((x, w), placements, strict=True)
        )
        assert off((a @ b.t()).full_tensor(), x @ w.t()) < 1e-6


def test_products_of_shards(two: Ranks) -> None:
    two.run(multiplied)


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


def test_a_layer_takes_bytes_that_others_cast(two: Ranks) -> None:
    two.run(own_style)
