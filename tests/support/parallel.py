"""A Llama block under tensor parallel, by float8's styles and by torch's own, and a single one."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from float8 import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
from support.models import LlamaBlock
from support.sharded import convert, here, whole

DIM, HIDDEN, TOKENS = 32, 48, 8
NO_GRADIENT = "attention.wk.bias"
"""Its gradient is 0 but for rounding: softmax sees differences only."""
STYLES = {
    "float8": (Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput),
    "torch": (ColwiseParallel, RowwiseParallel, PrepareModuleInput),
}


def part(x: Tensor, dim: int | None) -> Tensor:
    """What this rank holds of `x`, sharded along `dim`; None: all of it."""
    return (x if dim is None else x.chunk(dist.get_world_size(), dim)[dist.get_rank()]).clone()


def off(a: Tensor, b: Tensor) -> float:
    """The difference of `a`, relative to the norm of `b`."""
    return float(((a - b).norm() / b.norm()).detach())


def close(a: Tensor, b: Tensor) -> None:
    """Up to the order of sums; tensor cores keep few bits of them, and casts follow."""
    if a.is_cuda:
        assert off(a, b) < 2e-2
    else:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Sides(NamedTuple):
    pairs: dict[str, tuple[Tensor, Tensor]]
    """`output`, `input` for its gradient, gradients by name: on ranks, and on a single device."""
    seen: tuple[Any, Any]
    """What `watch` had to say of each."""

    def require_close(self) -> None:
        for mine, theirs in self.pairs.values():
            close(mine, theirs)


def both_sides(
    model: nn.Module,
    single: nn.Module,
    x: Tensor,
    g: Tensor,
    in_dim: int | None = None,
    out_dim: int | None = None,
    *,
    place: Callable[[Tensor, Any], Tensor] = part,
    call: Callable[[Tensor], Tensor] | None = None,
    watch: Callable[[], Any] = nullcontext,
) -> Sides:
    """Forward and backward of what ranks share, `x` and `g` along these dims, and of a single one.

    Parts of the output and of the gradient of `x` are compared with parts, of weights all.
    """
    own, own_g = place(x, in_dim).requires_grad_(), place(g, out_dim)
    x = x.clone().requires_grad_()
    with watch() as theirs:
        y = single(x)
        y.backward(g)
    with watch() as mine:
        own_y = (call or model)(own)
        own_y.backward(own_g)
    pairs = {"output": (own_y, place(y, out_dim)), "input": (own.grad, place(x.grad, in_dim))}
    for (name, parameter), other in zip(model.named_parameters(), single.parameters(), strict=True):
        grad = whole(parameter.grad)
        if isinstance(parameter, DTensor):
            assert parameter.grad.placements == parameter.placements
        elif in_dim is not None:  # a norm's, of the tokens of this rank
            dist.all_reduce(grad)
        pairs[name] = grad, other.grad
    pairs = {name: (whole(a), whole(b)) for name, (a, b) in pairs.items()}
    return Sides(pairs, (mine, theirs))


def alone() -> dist.ProcessGroup:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def block_of(recipe: str, bias: bool = False, all_gather: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return convert(LlamaBlock(DIM, HIDDEN, bias), recipe, all_gather).to(here())


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
