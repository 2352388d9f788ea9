"""Model the time of linear layers and experts in bf16 and in float8: what gains is converted.

Fitted to layers in compiled models, forward and backward, of H200s (docs/measuring.md).
"""

from typing import Any, NamedTuple

from float8.config import CastSite, Float8LinearConfig, Float8Weights
from float8.experts import names_to_gather, weights_of
from float8.tensor import local_tensor


class Cost(NamedTuple):
    """Milliseconds of a GPU for the GEMMs of a layer and their casts, by what it has."""

    flop: float  # for 1e12 FLOP, to the power of `_POWER`
    start: float  # for the layer, however small it is
    tokens: float  # for 1e9 elements of its output, whose gradient is cast; `_INPUT` of its input
    weight: float  # for 1e9 elements of its weight
    experts: float  # the same of experts, with what GEMMs of few tokens read


COSTS = {
    "bf16": Cost(1.426, 0.009, 0.0, 0.0, 1.46),
    "tensorwise": Cost(0.724, 0.021, 2.51, 1.9, 3.6),
    "delayed": Cost(0.705, 0.023, 2.80, 1.5, 3.83),
    "rowwise": Cost(0.739, 0.033, 2.70, 1.9, 3.57),
    "rowwise_with_gw_hp": Cost(0.968, 0.024, 1.71, 1.9, 3.10),
    "blockwise": Cost(0.775, 0.025, 2.44, 1.9, 3.45),
}
_INPUT = 0.85  # as several layers read one tensor, and kernels that make it find its amax
_POWER = 1.03  # the larger a GEMM, the nearer to its limit of power a GPU runs
_HOT = {"H100": 0.02, "H200": 0.0}  # added to it for float8 GEMMs of more than 1e12 FLOP

MEMORY = {"H100": 1.2, "H200": 1.0}  # how long bytes take, over those of an H200
_GROUPED = {"H100": 1.02, "H200": 1.0}  # how long float8 GEMMs of experts take, likewise
_GROUPED_BY_BLOCKS = 1.28  # how long those under blocks take, over the GEMMs of linear layers
_AT_LEAST = 1.01  # modelled, for what is converted
_FROZEN = {"tensorwise": 0.4, "delayed": 0.4}  # of casts of tokens whose transposes nobody needs
_HELD = 0.15  # of the casts of weights of experts that four microbatches share
_TRANSPOSED = 0.25  # of the casts of a weight: its bytes, for backward
ERROR, EXPERTS_ERROR = 0.05, 0.1  # by how much speed-ups may be missed, and those with experts

WAITS_BELOW_MS = 0.25
"""In bf16 on a GPU: a layer below has the GPU wait in float8. Compiled under `tensorwise`, one took
the CPU 0.36 ms with what is around it. A CUDA graph starts all kernels at once."""

NARROW = 256  # features, K and N alike, below which layers stay on a GPU that is not modelled


def layer_ms(
    gpu: str,
    recipe: str,
    tokens: float,
    K: int,
    N: int,
    *,
    trains: bool = True,
    experts: int = 0,
    casts: float = 1.0,
) -> float:
    """Return the modelled milliseconds of a linear layer, or of `experts` that share `tokens`.

    Forward and backward on `gpu`, of `MEMORY`, under `recipe`, of `COSTS`. A frozen layer, which
    does not train, has two GEMMs. `casts` is the share of the casts of the weight that this rank
    has: 1 / N where N ranks gather it in float8, a part if there is only float8.
    """
    cost, high = COSTS[recipe], COSTS["bf16"]
    share = 1.0 if trains else 2 / 3
    count = 6e-12 * share * tokens * K * N
    flop = cost.flop * float(count**_POWER)
    moved = cost.tokens * (1.0 if trains else _FROZEN.get(recipe, 1.0)) * tokens * (_INPUT * K + N)
    if experts:
        flop *= 1.0 if cost is high else _GROUPED[gpu]
        flop *= _GROUPED_BY_BLOCKS if recipe == "blockwise" else 1.0
        moved += (high.experts + casts * (cost.experts - high.experts)) * experts * K * N
    else:
        flop *= 1.0 if cost is high else max(1.0, count) ** _HOT[gpu]
        moved += casts * cost.weight * K * N
    return flop + share * cost.start + 1e-9 * MEMORY[gpu] * moved


def judged_as(config: Float8LinearConfig) -> str:
    """Return the recipe of `COSTS` for a configuration: one with scales of the same kind."""
    if config.only_on:
        return "blockwise"
    if any(how.scaling_granularity.by_rows for how in config.own_casts.values()):
        return "rowwise" if "grad_weight" in config.float8_gemms else "rowwise_with_gw_hp"
    activations = {CastSite.INPUT, CastSite.GRAD_OUTPUT}
    return "delayed" if activations.issubset(config.delayed_sites) else "tensorwise"


def both_ms(
    gpu: str, config: Float8LinearConfig, tokens: float, K: int, N: int, ranks: int, **of: Any
) -> tuple[float, float]:
    """Return `layer_ms` in bf16, and under `config`, where `ranks` gather the weight in float8."""
    share = {Float8Weights.HELD: _HELD if of.get("experts") else 1.0}
    share[Float8Weights.ONLY] = 1.0 if of.get("trains", True) else _TRANSPOSED
    casts = share.get(config.float8_weights, 1.0) / ranks
    high = layer_ms(gpu, "bf16", tokens, K, N, **of)
    return high, layer_ms(gpu, judged_as(config), tokens, K, N, casts=casts, **of)


def _lost(speedup: float, error: float) -> str:
    return f"{'loses' if speedup < 1 - error else 'about level'}: modelled {speedup:.2f}"


def why_slower(
    layer: Any, config: Float8LinearConfig, tokens: int, ranks: int, gpu: str, cuda_graphs: bool
) -> str | None:
    """Say that a layer, whose weight `ranks` share, loses or waits for the CPU, or return None."""
    K, N = layer.in_features, layer.out_features
    if gpu not in MEMORY:
        narrow = f"{min(K, N)} features are less than {NARROW}, and {gpu} is not modelled"
        return narrow if min(K, N) < NARROW else None
    trains = layer.weight.requires_grad
    high, low = both_ms(gpu, config, tokens, K, N, ranks, trains=trains)
    if high / low < _AT_LEAST:
        return f"{_lost(high / low, ERROR)}x of bf16 on {gpu}, {tokens} tokens per forward"
    if high < WAITS_BELOW_MS * (1.0 if trains else 2 / 3) and not cuda_graphs:
        why = f"{high:.2f} ms of {gpu} in bf16 is less than the CPU needs"
        return f"waits for the CPU: {why}; cuda_graphs=True converts it"
    return None


def why_experts_slower(
    module: Any, parent: Any, config: Float8LinearConfig, tokens: int, ranks: int, gpu: str
) -> str | None:
    """Say that experts, whose weights `ranks` share, lose with tokens spread evenly, or None."""
    near = gpu if gpu in MEMORY else "H100"  # another Hopper GPU: others have no such GEMM
    weights, top_k = weights_of(module), experts_per_token(module, parent)
    experts = local_tensor(module._parameters[weights[0].name]).shape[0]
    rows, high, low = tokens * top_k, 0.0, 0.0
    for name, _, N, K in weights:
        share = ranks_that_cast(module, name, experts, ranks)
        ms = both_ms(near, config, rows, K, N, share, experts=experts)
        high, low = high + ms[0], low + ms[1]
    told = f"{_lost(high / low, EXPERTS_ERROR)}x of bf16 on {near}, {rows / experts:.0f} tokens for"
    told += f" each of {experts} experts ({tokens} tokens go to {top_k} each)"
    return told if high / low < _AT_LEAST else None


def ranks_that_cast(module: Any, name: str, experts: int, ranks: int) -> int:
    """Return how many of `ranks` cast a share of a weight of experts: 1, if it is not gathered."""
    return min(ranks, experts) if name in names_to_gather(module) else 1


_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk")  # of most models, Gemma's, Aria's


def experts_per_token(module: Any, parent: Any) -> int:
    """Return how many experts a token goes to: transformers' say it, of torchtitan's the parent."""
    config, dispatcher = getattr(module, "config", None), getattr(parent, "token_dispatcher", None)
    said = [getattr(config, name, None) for name in _TOP_K]
    return next(filter(None, [*said, getattr(dispatcher, "top_k", None)]), 1)
