"""Tokens of experts that are sent in float8, against those that are sent in 16 bits."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from float8 import grouped_linear
from float8.config import CastConfig, ScalingGranularity
from float8.parallel.experts import all_to_all_in_float8
from float8.quantize import Cast, quantize
from float8.scales import dequantised
from support.models import seeded
from support.ranks import on
from support.sharded import Traffic

ROWS = CastConfig(
    target_dtype=torch.float8_e4m3fn,
    scaling_granularity=ScalingGranularity.AXISWISE,
    power_of_2=True,
)
K = 32
SENT = [[3, 5], [0, 7]]
"""Rows from each rank to each."""


def device_here() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def in_float8(x: Tensor) -> Tensor:
    return dequantised(quantize(x, Cast(ROWS), row=True).row, ROWS.scaling_granularity, x.dtype)


@on("either")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_gradients_and_bytes(dtype: torch.dtype) -> None:
    """What arrives is each row in float8, bit by bit, as are gradients; half the bytes are sent."""
    rank, device = dist.get_rank(), device_here()
    to, here = SENT[rank], [each[rank] for each in SENT]
    x = seeded(rank, sum(to), K, device=device).to(dtype).requires_grad_()
    g = seeded(7 + rank, sum(here), K, device=device).to(dtype)
    with Traffic() as seen:
        y = all_to_all_in_float8(x, here, to, dist.group.WORLD)
        y.backward(g)
    wanted = x.detach().requires_grad_()
    z = all_to_all_single_autograd(in_float8(wanted.detach()), here, to, dist.group.WORLD)
    assert y.dtype == dtype
    assert torch.equal(y, z)
    back = all_to_all_single_autograd(in_float8(g), to, here, dist.group.WORLD)
    assert torch.equal(x.grad, back)
    if device == "cpu":  # GPUs run backward in another thread
        rows, size = sum(to) + sum(here), dtype.itemsize
        assert seen.bytes_of("all_to_all")[torch.uint8] == K * rows
        assert sum(seen.bytes_of("all_to_all").values()) == (K + 4) * rows < size * K * rows
    # Cast again by a grouped GEMM, they are the same values.
    assert torch.equal(in_float8(y.detach()), y)


@on("either")
def test_experts_on_two_ranks_are_those_of_one() -> None:
    """Each rank has one of two experts: outputs and gradients as where one rank has both."""
    rank = dist.get_rank()
    to, here = SENT[rank], [each[rank] for each in SENT]
    device = device_here()
    every = [seeded(r, sum(SENT[r]), K, device=device).bfloat16() for r in range(2)]
    weights = seeded(5, 2, 48, K, device=device).bfloat16()
    mine = weights[rank : rank + 1].clone().requires_grad_()
    x = every[rank].clone().requires_grad_()
    tokens = all_to_all_in_float8(x, here, to, dist.group.WORLD)
    offs = torch.tensor([len(tokens)], dtype=torch.int32, device=device)
    y = all_to_all_single_autograd(grouped_linear(tokens, mine, offs), to, here, dist.group.WORLD)
    y.square().sum().backward()

    whole, both = torch.cat(every).requires_grad_(), weights.clone().requires_grad_()
    expert = torch.cat([torch.arange(2).repeat_interleave(torch.tensor(n)) for n in SENT])
    expert = expert.to(device)
    order = expert.sort(stable=True).indices
    ends = expert.bincount(minlength=2).cumsum(0).to(torch.int32)
    z = grouped_linear(whole[order], both, ends)
    z.square().sum().backward()
    begin = sum(SENT[0]) * rank
    rows = slice(begin, begin + len(x))
    assert torch.equal(y, z[order.argsort()][rows])
    assert torch.equal(mine.grad[0], both.grad[rank])
    assert torch.equal(x.grad, in_float8(whole.grad[rows]))


@on("two")
def test_bad_input_raises_on_each_rank() -> None:
    group = dist.group.WORLD
    for match, kind, x, splits in (
        ("dtype torch.int64", TypeError, torch.ones(4, K).long(), [2, 2]),
        ("multiple of 16", ValueError, torch.ones(4, 20), [2, 2]),
        ("sum up to the rows", ValueError, torch.ones(4, K), [2, 3]),
        ("one number for each of 2", ValueError, torch.ones(4, K), [4]),
    ):
        with pytest.raises(kind, match=match):
            all_to_all_in_float8(x, splits, splits, group)
