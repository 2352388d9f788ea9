"""A Llama block under tensor parallel, by float8's styles and by torch's own, and a single one."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

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
from support.models import LlamaBlock, forward_backward
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


def both_sides(
    model: nn.Module,
    single: nn.Module,
    x: Tensor,
    g: Tensor,
    in_dim: int | None = None,
    out_dim: int | None = None,
    *,
    place: Callable[[Tensor, Any], Tensor] = part,
    watch: Callable[[], Any] = nullcontext,
) -> tuple[dict[str, tuple[Tensor, Tensor]], tuple[Any, Any]]:
    """Forward and backward of what ranks share, `x` and `g` along these dims, and of a single one.

    Pairs of the `output`, the gradient of the `input`, of which parts are compared with parts, and
    of those of all weights; and what `watch` saw on each side.
    """
    with watch() as theirs:
        wanted = forward_backward(single, x, g)
    with watch() as mine:
        found = forward_backward(model, place(x, in_dim), place(g, out_dim))
    wanted |= {name: place(wanted[name], d) for name, d in (("output", out_dim), ("input", in_dim))}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            assert found[name].placements == parameter.placements
        elif in_dim is not None:  # a norm's, of the tokens of this rank
            dist.all_reduce(found[name])
    pairs = {name: (whole(each), whole(wanted[name])) for name, each in found.items()}
    return pairs, (mine, theirs)


def all_close(pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    for mine, theirs in pairs.values():
        close(mine, theirs)


def alone() -> dist.ProcessGroup:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def block_of(recipe: str, bias: bool = False, all_gather: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return convert(LlamaBlock(DIM, HIDDEN, bias), recipe, all_gather).to(here())


def plan_of(
    kind: str, sequence: bool, local: Sequence[str] = (), norms: bool = False
) -> dict[str, Any]:
    """Parts of a block named in `local` get plain tensors from what prepares their input."""
    colwise, rowwise, prepare = STYLES[kind]
    tokens = Shard(1) if sequence else Replicate()
    names = ("attention_norm", "ffn_norm") if norms and sequence else ()
    plan: dict[str, Any] = {name: SequenceParallel() for name in names}
    for part, first, last in (("attention", ("wq", "wk", "wv"), "wo"), ("ffn", ("w1", "w3"), "w2")):
        plan[part] = prepare(
            input_layouts=(tokens,),
            desired_input_layouts=(Replicate(),),
            use_local_output=part in local,
        )
        plan |= {f"{part}.{name}": colwise() for name in first}
        plan[f"{part}.{last}"] = rowwise(output_layouts=tokens)
    return plan
