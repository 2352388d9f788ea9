"""Plan the casts and grouped GEMMs of experts from a `Float8LinearConfig`."""

from dataclasses import replace

from float8.config import (
    CAST_SITES,
    GEMM_OPERANDS,
    CastConfig,
    CastSite,
    Float8LinearConfig,
    ScalingGranularity,
)
from float8.formats import E4M3
from float8.linear.plan import LinearPlan, cached_in_eager, resolve_plan

EXPECTED = "any recipe but 'delayed', or casts like those of another"
_WEIGHTS = CastSite.WEIGHT, CastSite.WEIGHT_FOR_GRAD_INPUT
_1x128, _1x32 = ScalingGranularity.BLOCK_1x128, ScalingGranularity.BLOCK_1x32


@cached_in_eager
def plan_experts(config: Float8LinearConfig) -> LinearPlan:
    """Return the casts, all to e4m3, and the grouped GEMMs of experts under `config`.

    All GEMMs use `config.gemm_config_output.use_fast_accum`: with False, their default, the two in
    backward take up to 1.6 times as long. Square blocks of tokens become 1 x k, to mix no experts.
    Raises `ValueError` for delayed scaling, weights in 1x128, output or grad_input not in float8.
    """
    if reason := no_grouped_gemm(config):
        raise ValueError(f"grouped_linear: got a config with {reason}, expected {EXPECTED}")
    fast = config.gemm_config_output.use_fast_accum  # costs 0.07 dB of SQNR at most
    casts: dict[CastSite, CastConfig] = {}
    for site in CAST_SITES:
        cast_config = config.cast_config(site)
        granularity = cast_config.scaling_granularity
        if granularity.by_blocks and site not in _WEIGHTS:
            granularity = _1x32 if granularity.exponents else _1x128
        casts[site] = replace(cast_config, target_dtype=E4M3, scaling_granularity=granularity)
    return resolve_plan(config, casts, dict.fromkeys(GEMM_OPERANDS, fast))


def no_grouped_gemm(config: Float8LinearConfig) -> str | None:
    """Return text that names a setting of `config` that experts do not support, or None."""
    if config.delayed_sites:
        return "delayed scaling, whose histories are of one tensor"
    if _1x128 in [config.cast_config(site).scaling_granularity for site in _WEIGHTS]:
        return "weights with scales of 1x128"
    if not {"output", "grad_input"} <= set(config.float8_gemms):
        return "the GEMM of output or grad_input in high precision"
    return None
