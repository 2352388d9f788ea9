"""The plan of a linear layer: its configuration, resolved once instead of at every call."""

import functools
from dataclasses import replace
from typing import NamedTuple

import torch

from float8.config import (
    CAST_SITES,
    GEMM_OPERANDS,
    CastSite,
    Float8LinearConfig,
    Float8Weights,
    ScalingGranularity,
    ScalingType,
)
from float8.formats import E4M3
from float8.gemm import Gemm
from float8.quantize import Cast


class Casts(NamedTuple):
    """The casts of a layer: one for each operand of its three GEMMs."""

    input: Cast
    weight: Cast
    grad_output: Cast
    input_for_grad_weight: Cast
    weight_for_grad_input: Cast
    grad_output_for_grad_weight: Cast


class LinearPlan(NamedTuple):
    """Six casts, three GEMMs (None: in high precision), and whether one cast serves two of them."""

    casts: Casts
    """Without state and ranks, which belong to a call."""
    reuse_input: bool
    reuse_weight: bool
    reuse_grad_output: bool
    output: Gemm | None
    grad_input: Gemm | None
    grad_weight: Gemm | None
    input_rows_suffice: bool
    """Whether both GEMMs of the input can read its row data: columns are made of them exactly."""
    grad_output_rows_suffice: bool
    """Likewise of grad_output."""


def plan_linear(config: Float8LinearConfig, *, grouped: bool = False) -> LinearPlan:
    """Resolve `config`; it is frozen, so layers of equal ones share a plan.

    `grouped`: all casts are to e4m3; what no grouped GEMM does raises a `ValueError`. All three use
    the `use_fast_accum` of `output`: exact sums take 1.1 to 1.6 times as long and gain 0.07 dB.
    Casts of tokens that have squares get runs, which are finer: a square may hold two groups.
    """
    # Dynamo looks through a cache, but warns of it.
    resolve = _resolved if torch.compiler.is_compiling() else _cached
    return resolve(config, grouped)


EXPECTED = "any recipe but 'delayed', or casts like those of another"
_WEIGHTS = CastSite.WEIGHT, CastSite.WEIGHT_FOR_GRAD_INPUT


def no_grouped_gemm(config: Float8LinearConfig) -> str | None:
    """Name what a configuration asks for and no grouped GEMM does, or return None."""
    if config.delayed_sites:
        return "delayed scaling, whose histories are of one tensor"
    covers = [config.cast_config(site).scaling_granularity for site in _WEIGHTS]
    if ScalingGranularity.BLOCK_1x128 in covers:
        return "weights with scales of 1x128"
    if not {"output", "grad_input"} <= set(config.float8_gemms):
        return "the GEMM of output or grad_input in high precision"
    return None


def _resolved(config: Float8LinearConfig, grouped: bool) -> LinearPlan:
    if grouped and (reason := no_grouped_gemm(config)):
        raise ValueError(f"grouped_linear: got a config with {reason}, expected {EXPECTED}")

    def cast(site: CastSite) -> Cast:
        how = config.cast_config(site)
        covers = how.scaling_granularity
        if covers.by_blocks and site not in _WEIGHTS:
            mx = covers.exponents
            covers = ScalingGranularity.BLOCK_1x32 if mx else ScalingGranularity.BLOCK_1x128
        return Cast(replace(how, target_dtype=E4M3, scaling_granularity=covers) if grouped else how)

    def gemm(name: str) -> Gemm | None:
        if name not in config.float8_gemms:
            return None
        a, b = (made[site].how for site in GEMM_OPERANDS[name])
        fast = getattr(config, f"gemm_config_{'output' if grouped else name}").use_fast_accum
        granularities = a.scaling_granularity, b.scaling_granularity
        # Weights that others published in float8 may have any scales, but for exponents; so may a
        # history that was loaded.
        ours = config.float8_weights is not Float8Weights.ONLY or b.scaling_granularity.exponents
        ours = ours and a.scaling_type is b.scaling_type is ScalingType.DYNAMIC
        rounded = a.power_of_2 and b.power_of_2 and ours
        return Gemm(fast, config.emulate, rounded, granularities)

    def rows_suffice(cast: Cast, *gemms: Gemm | None) -> bool:
        granularity, rounded = cast.how.scaling_granularity, cast.how.power_of_2
        return None not in gemms and (granularity.one_scale or (granularity.by_rows and rounded))

    made = {site: cast(site) for site in CAST_SITES}
    casts = Casts(*made.values())
    both = zip(casts[:3], casts[3:], strict=True)
    reuse_input, reuse_weight, reuse_grad = [first == second for first, second in both]
    output, grad_input, grad_weight = [gemm(name) for name in GEMM_OPERANDS]
    return LinearPlan(
        casts, reuse_input, reuse_weight, reuse_grad, output, grad_input, grad_weight,
        reuse_input and rows_suffice(casts.input, output, grad_weight),
        reuse_grad and rows_suffice(casts.grad_output, grad_input, grad_weight),
    )  # fmt: skip


_cached = functools.cache(_resolved)
