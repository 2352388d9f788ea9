"""What `Float8Linear` reads from its configuration, resolved once instead of at every call."""

from typing import NamedTuple

from float8.cast import CastPlan
from float8.config import BASE_SITE, CastSite, Float8GemmConfig, Float8LinearConfig
from float8.formats import E4M3


class GemmPlan(NamedTuple):
    """One GEMM."""

    float8: bool
    use_fast_accum: bool
    emulate: bool


class LinearPlan(NamedTuple):
    """Six casts, three GEMMs, and which casts serve two GEMMs."""

    input: CastPlan
    weight: CastPlan
    grad_output: CastPlan
    input_for_grad_weight: CastPlan
    weight_for_grad_input: CastPlan
    grad_output_for_grad_weight: CastPlan
    share_input: bool
    share_weight: bool
    share_grad_output: bool
    output: GemmPlan
    grad_input: GemmPlan
    grad_weight: GemmPlan
    pad: bool


def plan_linear(config: Float8LinearConfig) -> LinearPlan:
    """Resolve `config`; layers of equal configuration get equal plans."""

    def cast(site: CastSite) -> CastPlan:
        cast_config = config.cast_config(site)
        return CastPlan(
            dtype=cast_config.target_dtype or E4M3,
            delayed=cast_config.has_history,
            round_to_power_of_2=config.round_scales_to_power_of_2,
        )

    def gemm(name: str, gemm_config: Float8GemmConfig) -> GemmPlan:
        return GemmPlan(config.runs_in_float8(name), gemm_config.use_fast_accum, config.emulate)

    def shared(site: CastSite) -> bool:
        return config.owner(site) is BASE_SITE[site]

    return LinearPlan(
        **{site.value: cast(site) for site in CastSite},
        share_input=shared(CastSite.INPUT_FOR_GRAD_WEIGHT),
        share_weight=shared(CastSite.WEIGHT_FOR_GRAD_INPUT),
        share_grad_output=shared(CastSite.GRAD_OUTPUT_FOR_GRAD_WEIGHT),
        output=gemm("output", config.gemm_config_output),
        grad_input=gemm("grad_input", config.gemm_config_grad_input),
        grad_weight=gemm("grad_weight", config.gemm_config_grad_weight),
        pad=config.pad_inner_dim,
    )
