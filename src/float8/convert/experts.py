"""Judge on paper whether experts gain by float8, and tell the routers that choose between them."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from float8.config import Float8LinearConfig, Float8Weights
from float8.experts import ExpertsWeight, weights_of
from float8.tensor import local_tensor

# FLOP/s of grouped GEMMs in bf16 and in float8: of an H200 (docs/experts.md), an H100 is alike.
_MANY_ROWS, _FEW_ROWS = (665e12, 1150e12), (570e12, 850e12)
_FEW = 1024
"""Fewer rows than this, of each expert, multiply at the lower rates."""

COPIES = {"H100": 3.02e12, "H200": 4.25e12}
"""Bytes/s that a copy reads and writes."""

# What casts take, as bytes of a copy for each element: of a weight, cast once for the forward and
# once for the backward; and of what is cast to both layouts at once.
_UNDER_ONE_SCALE, _BY_ROWS = (11.1, 6.7), (9.5, 7.5)

_MICROBATCHES = 4
"""In which a held weight is cast once."""

_AT_LEAST = 1.07
"""On paper, for what that leaves out: launches, and groups that are filled up."""


def speedup_on_paper(
    gpu: str, rows: float, weight: ExpertsWeight, held: bool, by_rows: bool
) -> float:
    """Return bf16's time of the three GEMMs of one expert over float8's with its casts.

    Of `rows` tokens each; scales are those of rows and columns if `by_rows`.
    """
    _, _, N, K = weight
    in_bf16, in_float8 = _FEW_ROWS if rows < _FEW else _MANY_ROWS
    cast_twice, at_once = _BY_ROWS if by_rows else _UNDER_ONE_SCALE
    of_weight = at_once / _MICROBATCHES if held else cast_twice
    flop, moved = 6 * rows * N * K, of_weight * N * K + at_once * rows * (N + K)
    return (flop / in_bf16) / (flop / in_float8 + moved / COPIES[gpu])


def slower_on_paper(
    module: Any, parent: Any, config: Float8LinearConfig, tokens: int, gpu: str
) -> str | None:
    """Say that casts take longer than GEMMs gain, for the experts of a known kind, or return None.

    See `speedup_on_paper`. Tokens are taken to be spread evenly over the experts of this rank.
    """
    near = gpu if gpu in COPIES else "H100"  # another Hopper GPU: others have no such GEMM
    weights = weights_of(module)
    experts = local_tensor(module._parameters[weights[0].name]).shape[0]
    top_k = _top_k(module, parent)
    rows = tokens * top_k / experts
    held = config.float8_weights is Float8Weights.HELD
    how = held, config.cast_config_weight.scaling_granularity.by_rows
    # The time of all is what counts: the sum of both, each by its share of the work.
    work = [x.in_features * x.out_features for x in weights]
    times = [n / speedup_on_paper(near, rows, x, *how) for n, x in zip(work, weights, strict=True)]
    speedup = sum(work) / sum(times)
    if speedup >= _AT_LEAST:
        return None
    return (
        f"{speedup:.2f}x of bf16 on paper for {near}, with {rows:.0f} tokens for each expert "
        f"({tokens} tokens, {top_k} of {experts} experts each): a module_filter_fn takes them all "
        f"the same"
    )


_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk")
"""The names in most of transformers' configs, in Gemma's and in Aria's."""


def _top_k(module: Any, parent: Any) -> int:
    """Return how many experts a token goes to: transformers' say it, of torchtitan's the parent."""
    config, dispatcher = getattr(module, "config", None), getattr(parent, "token_dispatcher", None)
    said = [getattr(config, name, None) for name in _TOP_K]
    return next(filter(None, [*said, getattr(dispatcher, "top_k", None)]), 1)


def is_router(linear: Any, fqn: str, experts: Iterable[nn.Module]) -> bool:
    """Whether a linear layer chooses between the experts of its model, by its name and outputs."""
    named = any("router" in part or "gate" in part for part in fqn.split(".")[-2:])
    outputs = getattr(linear, "out_features", None)
    return named and any(x.experts == outputs for each in experts for x in weights_of(each)[:1])
