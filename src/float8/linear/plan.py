"""The plan of a linear layer: its configuration, resolved once instead of at every call."""

import functools
from typing import NamedTuple

import torch

from float8.config import (
    BASE_SITE,
    CAST_SITES,
    GEMM_OPERANDS,
    CastSite,
    Float8LinearConfig,
)
from float8.formats import E4M3
from float8.gemm import Gemm
from float8.quantize.quantize import Cast
from float8.quantize.spec import CastSpec


class Casts(NamedTuple):
    """The casts of a layer: one for each operand of its three GEMMs."""

    input: Cast
    weight: Cast
    grad_output: Cast
    input_for_grad_weight: Cast
    weight_for_grad_input: Cast
    grad_output_for_grad_weight: Cast


class LinearPlan(NamedTuple):
    """Six casts, three GEMMs (None: in high precision), and which casts serve two GEMMs."""

    casts: Casts
    """Without state: those of delayed scaling, and of ranks that share a layer, are made of them
    for each call."""
    share_input: bool
    share_weight: bool
    share_grad_output: bool
    output: Gemm | None
    grad_input: Gemm | None
    grad_weight: Gemm | None
    pad: bool
    alignment: int
    """The multiple that dims are padded to, or must be of."""

    input_rows_suffice: bool
    """Whether both GEMMs of the input can read its row data: columns are made of them exactly."""
    grad_output_rows_suffice: bool
    """Likewise of grad_output."""


def _serves_columns(cast: Cast) -> bool:
    """Whether column data are made of row data without rounding again: see `columns`."""
    of = cast.spec.granularity
    return of.one_scale or (of.by_rows and cast.spec.power_of_2)


def plan_linear(config: Float8LinearConfig) -> LinearPlan:
    """Resolve `config`; it is frozen, so layers of equal ones share a plan."""
    # Dynamo looks through a cache, but warns of it.
    return _resolved(config) if torch.compiler.is_compiling() else _cached(config)


def _resolved(config: Float8LinearConfig) -> LinearPlan:
    def cast(site: CastSite) -> Cast:
        how = config.cast_config(site)
        return Cast(
            CastSpec(
                how.target_dtype or E4M3,
                how.scaling_granularity,
                how.scaling_type,
                config.round_scales_to_power_of_2,
            )
        )

    def gemm(name: str) -> Gemm | None:
        if not config.runs_in_float8(name):
            return None
        a, b = (config.cast_config(site).scaling_granularity for site in GEMM_OPERANDS[name])
        fast = getattr(config, f"gemm_config_{name}").use_fast_accum
        return Gemm(fast, config.emulate, (a, b))

    def shared(site: CastSite) -> bool:
        return config.owner(site) is BASE_SITE[site]

    casts = Casts(*map(cast, CAST_SITES))
    output, grad_input, grad_weight = gemm("output"), gemm("grad_input"), gemm("grad_weight")
    share_input = shared(CastSite.INPUT_FOR_GRAD_WEIGHT)
    share_grad_output = shared(CastSite.GRAD_OUTPUT_FOR_GRAD_WEIGHT)
    input_once = share_input and None not in (output, grad_weight)
    grad_output_once = share_grad_output and None not in (grad_input, grad_weight)
    return LinearPlan(
        casts,
        share_input,
        shared(CastSite.WEIGHT_FOR_GRAD_INPUT),
        share_grad_output,
        output,
        grad_input,
        grad_weight,
        config.pad_inner_dim,
        config.alignment,
        input_rows_suffice=input_once and _serves_columns(casts.input),
        grad_output_rows_suffice=grad_output_once and _serves_columns(casts.grad_output),
    )


_cached = functools.cache(_resolved)
