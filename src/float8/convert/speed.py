"""Tell what is slower in float8 than in bf16: layers by measured limits, experts on paper."""

from typing import Any, NamedTuple

from float8.config import CastSite, Float8LinearConfig, Float8Weights
from float8.experts import weights_of
from float8.tensor import local_tensor


class Smallest(NamedTuple):
    """Below any of these a layer, forward and backward, takes longer in float8 than in bf16."""

    tokens: int
    features: int
    """K and N alike."""
    product: float
    """tokens * K * N"""


NARROW = 256
"""Features, K and N alike, below which layers stay on a GPU whose limits are not known."""

WAITS_BELOW = 34e9
"""tokens * K * N of a layer below which the CPU takes longer to start its kernels in float8 than
the GPU to run them in bf16. Compiled under `tensorwise`, one took the CPU 0.36 ms with what is
around it (h200-150m-kernels.json). A CUDA graph starts all at once."""

# GPU time, without what the CPU needs to issue it.
# Those of an H200 are what `float8 bench linear` says of 145 sizes (h200-smallest-layers.json). Of
# each recipe 93% or more are judged rightly; the others cost 0.2% of the time of all, or less. An
# H100 was not measured: its limits are those of an earlier fit, which had 10 compiled sizes, too,
# with the times of a slower memory, and no lower than what was measured there before
# (h100-linear-eager.json).
SMALLEST = {
    "H100": {
        "tensorwise": Smallest(1024, 1024, 34e9),
        "delayed": Smallest(1024, 1024, 34e9),
        "rowwise": Smallest(1024, 1024, 38e9),
        "rowwise_with_gw_hp": Smallest(2048, 1024, 34e9),
        "blockwise": Smallest(2048, 2048, 34e9),
    },
    "H200": {
        "tensorwise": Smallest(1024, 768, 19e9),
        "delayed": Smallest(1024, 768, 25e9),
        "rowwise": Smallest(1024, 1024, 34e9),
        "rowwise_with_gw_hp": Smallest(2048, 768, 25e9),
        "blockwise": Smallest(2048, 2048, 34e9),
    },
}


def judged_as(config: Float8LinearConfig) -> str:
    """Return the recipe whose limits hold for a configuration: one with scales of the same kind."""
    if config.scales_by_blocks:
        return "blockwise"
    if any(how.scaling_granularity.by_rows for how in config.own_casts.values()):
        return "rowwise" if "grad_weight" in config.float8_gemms else "rowwise_with_gw_hp"
    activations = {CastSite.INPUT, CastSite.GRAD_OUTPUT}
    return "delayed" if activations.issubset(config.delayed_sites) else "tensorwise"


def too_small(
    gpu: str, recipe: str, tokens: int, K: int, N: int, cuda_graphs: bool = False
) -> str | None:
    """Say which limit of a GPU a layer misses, or that it waits, or return None.

    Where limits are not known, `NARROW` is the only one: below what each GPU of `SMALLEST` needs.
    """
    has_limits = gpu in SMALLEST
    least = SMALLEST[gpu][recipe] if has_limits else Smallest(0, NARROW, 0.0)
    product = tokens * K * N
    for name, value, minimum in (
        ("tokens", tokens, least.tokens),
        ("K", K, least.features),
        ("N", N, least.features),
        ("tokens*K*N", product, least.product),
    ):
        if value < minimum:
            why = f"{recipe} is slower there on {gpu}"
            if not has_limits:
                why = f"slower on all GPUs with known limits, and {gpu} has none"
            return f"{name}={value:.4g} is less than {minimum:.4g}: {why}"
    if has_limits and product < WAITS_BELOW and not cuda_graphs:
        why = f"tokens*K*N={product:.4g} is less than {WAITS_BELOW:.4g}"
        return f"waits for the CPU: {why}; cuda_graphs=True converts it"
    return None


# ---------------------------------------------------------------- experts

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


def slower_on_paper(
    module: Any, parent: Any, config: Float8LinearConfig, tokens: int, gpu: str
) -> str | None:
    """Say that casts take longer than GEMMs gain, for the experts of a known kind, or return None.

    By bf16's time of the three GEMMs of an expert over float8's with its casts. Tokens are taken to
    be spread evenly over the experts of this rank.
    """
    near = gpu if gpu in COPIES else "H100"  # another Hopper GPU: others have no such GEMM
    weights = weights_of(module)
    experts = local_tensor(module._parameters[weights[0].name]).shape[0]
    top_k = _top_k(module, parent)
    rows = tokens * top_k / experts
    by_rows = config.cast_config_weight.scaling_granularity.by_rows
    cast_twice, at_once = _BY_ROWS if by_rows else _UNDER_ONE_SCALE
    held = config.float8_weights is Float8Weights.HELD
    weight_moves = at_once / _MICROBATCHES if held else cast_twice
    in_bf16, in_float8 = _FEW_ROWS if rows < _FEW else _MANY_ROWS
    flop = sum(6 * rows * N * K for _, _, N, K in weights)
    moved = sum(weight_moves * N * K + at_once * rows * (N + K) for _, _, N, K in weights)
    speedup = (flop / in_bf16) / (flop / in_float8 + moved / COPIES[near])
    if speedup >= _AT_LEAST:
        return None
    return (
        f"{speedup:.2f}x of bf16 on paper for {near}, with {rows:.0f} tokens for each expert "
        f"({tokens} tokens, {top_k} of {experts} experts each): a module_filter_fn takes them"
    )


_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk")
"""The names in most of transformers' configs, in Gemma's and in Aria's."""


def _top_k(module: Any, parent: Any) -> int:
    """Return how many experts a token goes to: transformers' say it, of torchtitan's the parent."""
    config, dispatcher = getattr(module, "config", None), getattr(parent, "token_dispatcher", None)
    said = [getattr(config, name, None) for name in _TOP_K]
    return next(filter(None, [*said, getattr(dispatcher, "top_k", None)]), 1)
