"""Model the time of linear layers and experts in bf16 and in float8: what gains is converted.

Fitted to layers in compiled models, forward and backward, of H200s (docs/measuring.md).
"""

from typing import Any, NamedTuple

from float8.config import GEMM_OPERANDS, Float8LinearConfig, Float8Weights, as_config
from float8.experts import names_to_gather, weights_of
from float8.tensor import local_tensor


class Cost(NamedTuple):
    """Milliseconds of a GPU for the GEMMs of a layer and their casts, by what it has."""

    flop: float  # for 1e12 FLOP, to the power of `_POWER`
    start: float  # for the layer, however small it is
    tokens: float  # for 1e9 elements of its output, whose gradient is cast; `_INPUT` of its input
    weight: float  # for 1e9 elements of its weight
    experts: float  # the same of experts, beside `_EXPERTS`
    rows: float  # the share of `tokens` for what output and grad_input read


COSTS = {
    "bf16": Cost(1.426, 0.009, 0.0, 0.0, 0.0, 0.0),
    "tensorwise": Cost(0.724, 0.021, 2.51, 1.9, 2.14, 0.4),
    "delayed": Cost(0.705, 0.023, 2.80, 1.5, 2.37, 0.4),
    "rowwise": Cost(0.739, 0.033, 2.70, 1.9, 2.11, 0.633),
    "blockwise": Cost(0.775, 0.025, 2.44, 1.9, 1.99, 0.633),
}
_EXPERTS = 1.46  # of what GEMMs of few tokens read, for 1e9 elements of weights of experts
_INPUT = 0.85  # as several layers read one tensor, and kernels that make it find its amax
_POWER = 1.03  # the larger a GEMM, the nearer to its limit of power a GPU runs
_HOT = {"H100": 0.02, "H200": 0.0}  # added to it for float8 GEMMs of more than 1e12 FLOP

MEMORY = {"H100": 1.2, "H200": 1.0}  # how long bytes take, over those of an H200
_GROUPED = {"H100": 1.02, "H200": 1.0}  # how long float8 GEMMs of experts take, likewise
_GROUPED_BY_BLOCKS = 1.28  # how long those under blocks take, over the GEMMs of linear layers
_AT_LEAST = 1.01  # modelled, for what is converted
_HELD = 0.15  # of the casts of weights of experts that four microbatches share
_TRANSPOSED = 0.25  # of the casts of a weight: its bytes, for grad_input
_GRAD_WEIGHT = 0.223  # of what experts take beside `_EXPERTS`: in float8, for grad_weight
ERROR, EXPERTS_ERROR = 0.05, 0.1  # by how much speed-ups may be missed, and those with experts

WAITS_BELOW_MS = 0.25
"""In bf16 on a GPU: a layer below has the GPU wait in float8. Compiled under `tensorwise`, one took
the CPU 0.36 ms with what is around it. A CUDA graph starts all kernels at once."""

NARROW = 256  # features, K and N alike, below which layers stay on a GPU that is not modelled


def gemm_kinds(recipe: str | Float8LinearConfig) -> dict[str, str]:
    """Return for each GEMM the row of `COSTS` that models it, by the scales of its operands."""
    kinds = dict.fromkeys(GEMM_OPERANDS, "bf16")
    for gemm in () if recipe == "bf16" else as_config(recipe).float8_gemms:
        casts = [as_config(recipe).cast_config(site) for site in GEMM_OPERANDS[gemm]]
        scales = [cast.scaling_granularity for cast in casts]
        kind = "delayed" if any(x.scaling_type.value == "delayed" for x in casts) else "tensorwise"
        kind = "rowwise" if any(each.by_rows for each in scales) else kind
        kinds[gemm] = "blockwise" if any(each.by_blocks for each in scales) else kind
    return kinds


def judged_as(config: Float8LinearConfig) -> str:
    """Return the row of `COSTS` of all GEMMs, or that of each."""
    kinds = gemm_kinds(config)
    each = ", ".join(f"{gemm} {kind}" for gemm, kind in kinds.items())
    return kinds["output"] if len({*kinds.values()}) == 1 else each


def layer_ms(
    gpu: str,
    recipe: str | Float8LinearConfig,
    tokens: float,
    K: int,
    N: int,
    *,
    trains: bool = True,
    experts: int = 0,
    casts: float = 1.0,
) -> float:
    """Return the modelled milliseconds of a linear layer, or of `experts` that share `tokens`.

    Forward and backward on `gpu`, of `MEMORY`, in `"bf16"`, or under a recipe or configuration, of
    which each GEMM is modelled by itself. A frozen layer has two. `casts` is the share of the casts
    of the weight that this rank has: 1 / N where N ranks gather it, a part if there is only float8.
    """
    costs, high = [COSTS[kind] for kind in gemm_kinds(recipe).values()], COSTS["bf16"]
    emulated = not isinstance(recipe, str) and recipe.emulate
    costs[2], share = (costs[2], 1.0) if trains else (high, 2 / 3)
    count, flop, start = 6e-12 * share * tokens * K * N, 0.0, 0.0
    for cost in costs[: 3 if trains else 2]:
        start += cost.start / 3
        slower = _GROUPED[gpu] if experts else max(1.0, count) ** _HOT[gpu]
        slower *= _GROUPED_BY_BLOCKS if experts and cost is COSTS["blockwise"] else 1.0
        flop += (high.flop if emulated or cost is high else cost.flop * slower) / (3 * share)
    output, grad_input, grad_weight = costs
    of_input = output.rows * output.tokens + (1 - output.rows) * grad_weight.tokens
    of_output = grad_input.rows * grad_input.tokens + (1 - grad_input.rows) * grad_weight.tokens
    moved = tokens * (_INPUT * of_input * K + of_output * N)
    first, second, last = (x.experts if experts else x.weight for x in costs)
    of_weight = second if output is high else first - _TRANSPOSED * (first - second)
    of_weight += _GRAD_WEIGHT * (last - of_weight) if experts else 0.0
    moved += (_EXPERTS * experts + casts * of_weight * (experts or 1)) * K * N
    return flop * float(count**_POWER) + start + 1e-9 * MEMORY[gpu] * moved


def both_ms(
    gpu: str, config: Float8LinearConfig, tokens: float, K: int, N: int, ranks: int, **of: Any
) -> tuple[float, float]:
    """Return `layer_ms` in bf16, and under `config`, where `ranks` gather the weight in float8."""
    share = {Float8Weights.HELD: _HELD if of.get("experts") else 1.0}
    share[Float8Weights.ONLY] = 1.0 if of.get("trains", True) else _TRANSPOSED
    casts = share.get(config.float8_weights, 1.0) / ranks
    high = layer_ms(gpu, "bf16", tokens, K, N, **of)
    return high, layer_ms(gpu, config, tokens, K, N, casts=casts, **of)


def _lost(config: Float8LinearConfig, speedup: float, error: float, told: str) -> str | None:
    """Say that a modelled speed-up does not gain, or return None."""
    if config.emulate:
        return "loses: emulate=True computes GEMMs in high precision, and casts for them"
    word = "loses" if speedup < 1 - error else "about level"
    return None if speedup >= _AT_LEAST else f"{word}: modelled {speedup:.2f}x of bf16 on {told}"


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
    lost = _lost(config, high / low, ERROR, f"{gpu}, {tokens} tokens per forward")
    if lost or cuda_graphs or high >= WAITS_BELOW_MS * (1.0 if trains else 2 / 3):
        return lost
    why = f"{high:.2f} ms of {gpu} in bf16 is less than the CPU needs"
    return f"waits for the CPU: {why}; cuda_graphs=True converts it"


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
    told = f"{near}, {rows / experts:.0f} tokens for each of {experts} experts"
    told += f" ({tokens} tokens go to {top_k} each)"
    return _lost(config, high / low, EXPERTS_ERROR, told)


def ranks_that_cast(module: Any, name: str, experts: int, ranks: int) -> int:
    """Return how many of `ranks` cast a share of a weight of experts: 1, if it is not gathered."""
    return min(ranks, experts) if name in names_to_gather(module) else 1


_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk")  # of most models, Gemma's, Aria's


def experts_per_token(module: Any, parent: Any) -> int:
    """Return how many experts a token goes to: transformers' say it, of torchtitan's the parent."""
    config, dispatcher = getattr(module, "config", None), getattr(parent, "token_dispatcher", None)
    said = [getattr(config, name, None) for name in _TOP_K]
    return next(filter(None, [*said, getattr(dispatcher, "top_k", None)]), 1)
