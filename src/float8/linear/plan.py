"""`LinearPlan`: the casts and GEMMs of a linear layer, computed once from its configuration."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from float8.config import (
    CAST_SITES,
    GEMM_OPERANDS,
    CastConfig,
    CastSite,
    Float8LinearConfig,
    Float8Weights,
    ScalingType,
)
from float8.gemm import Gemm
from float8.quantize import Cast


class Casts(NamedTuple):
    """The six casts of a linear layer, one for each operand of its three GEMMs."""

    input: Cast
    weight: Cast
    grad_output: Cast
    input_for_grad_weight: Cast
    weight_for_grad_input: Cast
    grad_output_for_grad_weight: Cast


class LinearPlan(NamedTuple):
    """The six casts and three GEMMs of a layer; a GEMM that is None runs in high precision."""

    casts: Casts  # a call may add stored scales, and reductions of amaxes over ranks
    reuse_input: bool  # one cast of the input serves output and grad_weight
    reuse_weight: bool  # one cast of the weight serves output and grad_input
    reuse_grad_output: bool  # one cast of grad_output serves grad_input and grad_weight
    output: Gemm | None
    grad_input: Gemm | None
    grad_weight: Gemm | None
    input_rows_suffice: bool
    """Whether output and grad_weight share a float8 cast of the input by one scale, or by powers of
    two per row, so that its row data serve both: column data can be made from them."""
    grad_output_rows_suffice: bool
    """Whether grad_input and grad_weight share such a cast of grad_output; row data serve both."""


Planner = Callable[[Float8LinearConfig], LinearPlan]


def cached_in_eager(plan: Planner) -> Planner:
    """Decorate `plan`: eager code caches its result by configuration, compiled code calls it."""
    cached = functools.cache(plan)  # Dynamo looks through a cache, but warns of it
    return lambda config: (plan if torch.compiler.is_compiling() else cached)(config)


@cached_in_eager
def plan_linear(config: Float8LinearConfig) -> LinearPlan:
    """Return the plan of linear layers with `config`: their casts, and settings of their GEMMs."""
    casts = {site: config.cast_config(site) for site in CAST_SITES}
    fast = {name: getattr(config, f"gemm_config_{name}").use_fast_accum for name in GEMM_OPERANDS}
    return resolve_plan(config, casts, fast)


def resolve_plan(
    config: Float8LinearConfig, casts: dict[CastSite, CastConfig], fast_accum: dict[str, bool]
) -> LinearPlan:
    """Return the casts and GEMMs of a layer with `config`, and which casts serve two GEMMs.

    `casts` are its six casts, `fast_accum` the flags of "output", "grad_input" and "grad_weight".
    """

    def gemm(name: str) -> Gemm | None:
        if name not in config.float8_gemms:
            return None
        a, b = (casts[site] for site in GEMM_OPERANDS[name])
        granularities = a.scaling_granularity, b.scaling_granularity
        # Scales loaded from files need not be powers of two, whatever `config` says: scales of
        # float8 weights (unless stored as 8-bit exponents), and of delayed scaling.
        loaded = config.float8_weights is Float8Weights.ONLY and not granularities[1].exponents
        dynamic = a.scaling_type is ScalingType.DYNAMIC and b.scaling_type is ScalingType.DYNAMIC
        powers_of_2 = a.power_of_2 and b.power_of_2 and dynamic and not loaded
        return Gemm(fast_accum[name], config.emulate, powers_of_2, granularities)

    def rows_suffice(cast: Cast, *gemms: Gemm | None) -> bool:
        """Return whether `gemms` are in float8, and row data of `cast` can become column data."""
        granularity = cast.config.scaling_granularity
        to_col_is_exact = granularity.one_scale or (granularity.by_rows and cast.config.power_of_2)
        return to_col_is_exact and None not in gemms  # a GEMM in high precision is None

    all_casts = Casts(*(Cast(casts[site]) for site in CAST_SITES))
    pairs = zip(all_casts[:3], all_casts[3:], strict=True)  # (input, input_for_grad_weight), ...
    reuse_input, reuse_weight, reuse_grad = [first == second for first, second in pairs]
    output, grad_input, grad_weight = [gemm(name) for name in GEMM_OPERANDS]
    input_rows = reuse_input and rows_suffice(all_casts.input, output, grad_weight)
    grad_rows = reuse_grad and rows_suffice(all_casts.grad_output, grad_input, grad_weight)
    return LinearPlan(
        all_casts, reuse_input, reuse_weight, reuse_grad, output, grad_input, grad_weight,
        input_rows_suffice=input_rows, grad_output_rows_suffice=grad_rows,
    )  # fmt: skip
