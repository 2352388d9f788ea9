"""Model the time of layers in bf16 and float8, fitted to compiled ones (docs/measuring.md)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from float8.config import GEMM_OPERANDS, Float8LinearConfig, Float8Weights, as_config


class Cost(NamedTuple):
    """Coefficients of the modelled time of forward and backward of a trained layer on an H200.

    In ms, for M tokens and a weight [N, K]: `flop * (6e-12 * M * N * K)**1.03 + start + 1e-9 *
    (tokens * (0.85 * M * K + M * N) + weight * N * K)`. For E experts with M tokens in all,
    `(experts + 1.11) * E` replaces `weight`, and blockwise GEMMs take 1.18 times as long. `rows`, 0
    to 1, is the share of `tokens` that casts for output and grad_input take; casts for grad_weight
    take the rest.
    """

    flop: float  # per 1e12 FLOP, to the power of `_FLOP_EXPONENT`
    start: float  # per layer, however small
    tokens: float  # per 1e9 elements of grad_output; times `_INPUT_SHARE` per 1e9 of the input
    weight: float  # per 1e9 elements of the weight of a linear layer
    experts: float  # per 1e9 elements of the weights of experts, beside `_MS_TO_READ_EXPERTS`
    rows: float  # the share of `tokens` for casts that output and grad_input read


COSTS = {
    "bf16": Cost(1.426, 0.009, 0.0, 0.0, 0.0, 0.0),
    "tensorwise": Cost(0.724, 0.021, 2.51, 1.9, 1.68, 0.4),
    "delayed": Cost(0.705, 0.023, 2.80, 1.5, 1.86, 0.4),
    "rowwise": Cost(0.739, 0.033, 2.70, 1.9, 1.78, 0.633),
    "blockwise": Cost(0.775, 0.025, 2.44, 1.9, 1.03, 0.633),
}
_MS_TO_READ_EXPERTS = 1.11  # per 1e9 elements of weights of experts, read by GEMMs with few tokens
_INPUT_SHARE = 0.85  # as layers share an input, and kernels that produce it take its amax
_FLOP_EXPONENT = 1.03  # the larger a GEMM, the nearer a GPU runs to its power limit
_EXPONENT_IF_LARGE = {"H100": 0.02, "H200": 0.0}  # more, in float8, for over 1e12 FLOP

MEMORY = {"H100": 1.2, "H200": 1.0}  # time to move bytes, relative to an H200
MODELLED = tuple(MEMORY)  # the GPUs whose time is modelled
_GROUPED_TIME = {"H100": 1.12, "H200": 1.0}  # time of float8 GEMMs of experts, relative to an H200
_GROUPED_BY_BLOCKS = {"H100": 1.24, "H200": 1.18}  # of blockwise GEMMs, relative to linear layers
_MIN_GAIN = 1.01  # the modelled speed-up from which a layer is converted
_GATHERED, _GATHERED_EXPERTS = 1.6, 2.4  # ms of an H200 saved per 1e9 elements gathered in float8
_HELD_EXPERTS_SHARE = 0.08  # of casts of weights of experts, left if held for four microbatches
_TRANSPOSE_SHARE = 0.25  # the share of the casts of a weight that transposes it for grad_input
_GRAD_WEIGHT_SHARE = 0.27  # the share of `experts` that falls away if grad_weight is in bf16
ERROR, EXPERTS_ERROR = 0.05, 0.1  # errors of modelled speed-ups, without and with experts

WAITS_BELOW_MS = 0.25
"""The bf16 time on a GPU below which a layer in float8 has the GPU wait for the CPU, 2/3 of it for
frozen layers. A compiled layer and the code around it took the CPU 0.36 ms; CUDA graphs none."""

FSDP_WAITS_BELOW_MS = 0.57
"""The mean bf16 time of layers below which FSDP2 with a float8 gather has the GPU wait for the CPU.
Models of 0.30, 0.55 and 0.61 ms ran at 0.69, 1.00 and 1.13 times the speed of bf16."""

NARROW = 256  # fewer features, K or N, keep a layer in bf16 on a GPU that is not modelled


def gemm_kinds(recipe: str | Float8LinearConfig) -> dict[str, str]:
    """Return the recipe, or "bf16", that models each GEMM's time: {"output": "rowwise", ...}."""
    kinds = dict.fromkeys(GEMM_OPERANDS, "bf16")
    for gemm in () if recipe == "bf16" else as_config(recipe).float8_gemms:
        casts = [as_config(recipe).cast_config(site) for site in GEMM_OPERANDS[gemm]]
        scales = [cast.scaling_granularity for cast in casts]
        kind = "delayed" if any(x.scaling_type.value == "delayed" for x in casts) else "tensorwise"
        kind = "rowwise" if any(x.by_rows for x in scales) else kind
        kinds[gemm] = "blockwise" if any(x.by_blocks for x in scales) else kind
    return kinds


def judged_as(config: Float8LinearConfig) -> str:
    """Return which recipe models the time of GEMMs: "rowwise", or each: "output rowwise, ..."."""
    kinds = gemm_kinds(config)
    listed = ", ".join(f"{gemm} {kind}" for gemm, kind in kinds.items())
    return kinds["output"] if len({*kinds.values()}) == 1 else listed


def layer_ms(
    gpu: str,  # "H100" or "H200"
    recipe: str | Float8LinearConfig,  # a recipe's name, a config, or "bf16"
    tokens: float,  # rows of the input, of all experts together
    K: int,
    N: int,
    *,
    trains: bool = True,  # False: the weight is frozen
    experts: int = 0,  # the number of weights [N, K]; 0: a linear layer, with one
    casts: float = 1.0,  # the share, 0 to 1, of the casts of the weight that this rank runs
) -> float:
    """Return the modelled GPU time, in ms, of forward and backward with a weight [N, K]."""
    bf16, is_emulated = COSTS["bf16"], not isinstance(recipe, str) and recipe.emulate
    gemms = [COSTS[kind] for kind in gemm_kinds(recipe).values()][: 3 if trains else 2]
    launch_ms = sum(gemm.start / 3 for gemm in gemms)  # `start` is fitted to three GEMMs
    tflop = 2e-12 * len(gemms) * tokens * K * N
    ms_per_tflop = 0.0
    for gemm in gemms:
        # A float8 GEMM of experts, or a large one on an H100, takes longer than `gemm.flop` says.
        slowdown = _GROUPED_TIME[gpu] if experts else max(1.0, tflop) ** _EXPONENT_IF_LARGE[gpu]
        slowdown *= _GROUPED_BY_BLOCKS[gpu] if experts and gemm is COSTS["blockwise"] else 1.0
        flop_ms = bf16.flop if is_emulated or gemm is bf16 else gemm.flop * slowdown
        ms_per_tflop += flop_ms / len(gemms)
    # Casts, in ms per 1e9 elements on an H200: row data (the share `rows`), and column data.
    output, grad_input, grad_weight = gemms if trains else (*gemms, bf16)  # bf16: no casts
    input_ms = output.rows * output.tokens + (1 - output.rows) * grad_weight.tokens
    grad_ms = grad_input.rows * grad_input.tokens + (1 - grad_input.rows) * grad_weight.tokens
    # `_TRANSPOSE_SHARE` of the casts of a weight is for grad_input, and costs nothing if that is in
    # bf16; the rest is for output. If output is in bf16, grad_input needs a whole cast.
    weight_ms, transposed_ms = (x.experts if experts else x.weight for x in (output, grad_input))
    weight_ms -= _TRANSPOSE_SHARE * (weight_ms - transposed_ms)
    weight_ms = transposed_ms if output is bf16 else weight_ms
    if experts:
        weight_ms += _GRAD_WEIGHT_SHARE * (grad_weight.experts - weight_ms)
    casts_of_tokens = tokens * (_INPUT_SHARE * input_ms * K + grad_ms * N)
    casts_of_weights = (_MS_TO_READ_EXPERTS * experts + casts * weight_ms * (experts or 1)) * K * N
    cast_ms = 1e-9 * MEMORY[gpu] * (casts_of_tokens + casts_of_weights)
    return ms_per_tflop * float(tflop**_FLOP_EXPONENT) + launch_ms + cast_ms


def compared_ms(
    gpu: str, config: Float8LinearConfig, tokens: float, K: int, N: int, ranks: int, **layer: Any
) -> tuple[float, float, float]:
    """Return modelled ms of a layer: (in bf16, saved by float8 gathers, in float8 without gathers).

    The speed-up is (first + second) / third. The input has `tokens` rows; `ranks` share casts and
    gathers of the weight [N, K]. `layer` is passed to `layer_ms`: `trains` (False: the weight is
    frozen), `experts` (the number of weights [N, K]; 0: a linear layer).
    """
    share = {Float8Weights.HELD: _HELD_EXPERTS_SHARE if layer.get("experts") else 1.0}
    share[Float8Weights.ONLY] = 1.0 if layer.get("trains", True) else _TRANSPOSE_SHARE
    casts = share.get(config.float8_weights, 1.0) / ranks
    bf16_ms = layer_ms(gpu, "bf16", tokens, K, N, **layer)
    gathered = _GATHERED_EXPERTS * layer.get("experts", 0) or _GATHERED
    saved_ms = 1e-9 * MEMORY[gpu] * gathered * K * N if ranks > 1 else 0.0
    return bf16_ms, saved_ms, layer_ms(gpu, config, tokens, K, N, casts=casts, **layer)


def no_gain(config: Float8LinearConfig, speedup: float, error: float, where: str) -> str | None:
    """Return, as text, why `speedup` by float8 is too small, or None if it is at least 1.01.

    The text calls a speed-up below `1 - error` a loss, and others "about level"; `where`, a part of
    it, names GPU and tokens. With `config.emulate`, any `speedup` counts as a loss.
    """
    if config.emulate:
        return "loses: emulate=True computes GEMMs in high precision, and casts for them"
    word = "loses" if speedup < 1 - error else "about level"
    return None if speedup >= _MIN_GAIN else f"{word}: modelled {speedup:.2f}x of bf16 on {where}"


def why_slower(
    layer: Any, config: Float8LinearConfig, tokens: int, ranks: int, gpu: str, *, waits: bool
) -> str | None:
    """Return why float8 would not make the linear `layer` faster on `gpu`, or None if it may.

    The input has `tokens` rows; `ranks` share casts of the weight. If `waits`, a layer so small
    that `gpu` would wait for the CPU gets a reason, too. On a GPU that is no H100 or H200, the only
    reason is fewer than 256 input or output features.
    """
    K, N, trains = layer.in_features, layer.out_features, layer.weight.requires_grad
    if gpu not in MODELLED:
        narrow = f"{min(K, N)} features are less than {NARROW}, and {gpu} is not modelled"
        return narrow if min(K, N) < NARROW else None
    bf16_ms, saved_ms, float8_ms = compared_ms(gpu, config, tokens, K, N, ranks, trains=trains)
    where = f"{gpu}, {tokens} tokens per forward"
    reason = no_gain(config, (bf16_ms + saved_ms) / float8_ms, ERROR, where)
    if reason or not waits or bf16_ms >= WAITS_BELOW_MS * (1.0 if trains else 2 / 3):
        return reason
    why = f"{bf16_ms:.2f} ms of {gpu} in bf16 is less than the CPU needs"
    return f"waits for the CPU: {why}; cuda_graphs=True converts it"


def why_fsdp_waits(layers: Mapping[Any, str], tokens: int) -> str | None:
    """Return why the GPU would wait for the CPU under FSDP2's float8 gathers, or None if not.

    It would if forward and backward of a layer, in bf16 for `tokens` rows, are modelled to take
    below 0.57 ms on average over those of `layers`, {layer: name of its GPU}, on H100s and H200s.
    """
    bf16_ms = []
    for layer, gpu in layers.items():
        if gpu in MODELLED:
            K, N, trains = layer.in_features, layer.out_features, layer.weight.requires_grad
            bf16_ms.append(layer_ms(gpu, "bf16", tokens, K, N, trains=trains))
    if not bf16_ms or (mean := sum(bf16_ms) / len(bf16_ms)) >= FSDP_WAITS_BELOW_MS:
        return None
    why = f"{mean:.2f} ms a layer in bf16, on average, is less than the CPU needs under FSDP2"
    return f"waits for the CPU: {why}; more tokens, or cuda_graphs=True, may change that"
