"""A Llama block under tensor parallel: by float8's styles and by torch's own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.checkpoint import checkpoint

from float8 import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    attach_to_optimizer,
)
from support.models import FeedForward, seeded
from support.sharded import convert, here

DIM, HIDDEN, TOKENS = 32, 48, 8
NO_GRADIENT = "attention.wk.bias"
"""Its gradient is 0 but for rounding: softmax sees differences only."""
STYLES = {
    "float8": (Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput),
    "torch": (ColwiseParallel, RowwiseParallel, PrepareModuleInput),
}


def mesh_of() -> DeviceMesh:
    return init_device_mesh(here().type, (dist.get_world_size(),))


def part(x: Tensor, dim: int) -> Tensor:
    """What this rank holds of `x`, sharded along `dim`."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def off(a: Tensor, b: Tensor) -> float:
    """The difference of `a`, relative to the norm of `b`."""
    return float(((a - b).norm() / b.norm()).detach())


def close(a: Tensor, b: Tensor) -> None:
    """Up to the order of sums; tensor cores keep few bits of them, and casts follow."""
    if a.is_cuda:
        assert off(a, b) < 2e-2
    else:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def alone() -> dist.ProcessGroup:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def train_both(
    whole: nn.Module,
    block: nn.Module,
    sequence: bool,
    microbatches: int,
    checkpointed: bool,
    delayed: bool,
) -> None:
    """Five steps on both; where sums differ in their last bits, few casts round otherwise."""
    losses = []
    for model, sharded in ((whole, False), (block, sequence)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        if delayed:
            attach_to_optimizer(model, optimizer, group=None if model is block else alone())
        for step in range(5):
            optimizer.zero_grad()
            for microbatch in range(microbatches):
                x = seeded(10 * step + microbatch, 2, TOKENS, DIM, device=here())
                x, to = (part(t, 1) if sharded else t for t in (x, x.roll(1, -1)))
                y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
                loss = (y - to).square().sum() / (2 * TOKENS * DIM)
                loss.backward()
            optimizer.step()
        if sharded:
            dist.all_reduce(loss)
        losses.append(loss.detach())
    assert off(losses[1], losses[0]) < 1e-3
    buffers = dict(block.named_buffers())
    for name, expected in whole.named_buffers():  # of delayed scaling
        assert expected.amax() > 0 or "history" not in name
        torch.testing.assert_close(buffers[name], expected, rtol=1e-2, atol=0.0, msg=name)
    offs = {}
    for (name, mine), theirs in zip(block.named_parameters(), whole.parameters(), strict=True):
        for what, a, b in (("value", mine, theirs), ("grad", mine.grad, theirs.grad)):
            offs[name, what] = off(a.full_tensor() if isinstance(a, DTensor) else a, b)
    offs.pop((NO_GRADIENT, "grad"), None)
    assert max(offs.values()) < 1e-2, offs


class Attention(nn.Module):
    """Causal grouped-query attention, without positions: 6 heads, 2 of them for keys and values."""

    HEAD = 16

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        heads, kv = 6 * self.HEAD, 2 * self.HEAD
        self.wq, self.wk = nn.Linear(DIM, heads, bias), nn.Linear(DIM, kv, bias)
        self.wv, self.wo = nn.Linear(DIM, kv, bias), nn.Linear(heads, DIM, bias)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (t.unflatten(-1, (-1, self.HEAD)).transpose(1, 2) for t in projected)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class LlamaBlock(nn.Module):
    """What tensor parallel is mostly for."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.ffn = Attention(bias), FeedForward(DIM, HIDDEN, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


def block_of(recipe: str, bias: bool = False, *, fuse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return convert(LlamaBlock(bias), recipe, all_gather=False, fuse=fuse).to(here())


def plan_of(kind: str, sequence: bool, local: bool = False, norms: bool = False) -> dict[str, Any]:
    colwise, rowwise, prepare = STYLES[kind]
    tokens = Shard(1) if sequence else Replicate()
    names = ("attention_norm", "ffn_norm") if norms and sequence else ()
    plan: dict[str, Any] = {name: SequenceParallel() for name in names}
    for part, first, last in (("attention", ("wq", "wk", "wv"), "wo"), ("ffn", ("w1", "w3"), "w2")):
        plan[part] = prepare(
            input_layouts=(tokens,), desired_input_layouts=(Replicate(),), use_local_output=local
        )
        plan |= {f"{part}.{name}": colwise() for name in first}
        plan[f"{part}.{last}"] = rowwise(output_layouts=tokens)
    return plan
