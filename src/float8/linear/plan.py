"""What a linear layer reads from its configuration, resolved once instead of at every call."""

import functools
from typing import NamedTuple

import torch

from float8.config import (
    BASE_SITE,
    CAST_SITES,
    GEMM_OPERANDS,
    CastSite,
    Float8LinearConfig,
    ScalingGranularity,
)
from float8.formats import E4M3
from float8.gemm import Gemm
from float8.quantize.spec import CastSpec

TENSORWISE = ScalingGranularity.TENSORWISE


class LinearPlan(NamedTuple):
    """Six casts, three GEMMs (None: in high precision), and which casts serve two GEMMs."""

    input: CastSpec
    weight: CastSpec
    grad_output: CastSpec
    input_for_grad_weight: CastSpec
    weight_for_grad_input: CastSpec
    grad_output_for_grad_weight: CastSpec
    share_input: bool
    share_weight: bool
    share_grad_output: bool
    output: Gemm | None
    grad_input: Gemm | None
    grad_weight: Gemm | None
    pad: bool
    alignment: int
    """What dims are padded to, or must be multiples of."""

    def casts_input_once(self) -> bool:
        """Whether the bytes of one cast of the input, with their scales, are all its GEMMs read."""
        gemms = self.output is not None and self.grad_weight is not None
        return gemms and self.share_input and _serves_columns(self.input)

    def casts_grad_output_once(self) -> bool:
        """The same of grad_output."""
        gemms = self.grad_input is not None and self.grad_weight is not None
        return gemms and self.share_grad_output and _serves_columns(self.grad_output)

    def casts_weight_dynamically(self) -> bool:
        """Whether forward casts the weight under one scale of its values."""
        in_float8 = self.output is not None and self.weight.granularity is TENSORWISE
        return in_float8 and not self.weight.delayed

    def casts_delayed(self, role: str) -> bool:
        """Whether all casts of `"input"`, `"weight"` or `"grad_output"` have delayed scaling."""
        uses = {
            "input": (self.input, self.input_for_grad_weight),
            "weight": (self.weight, self.weight_for_grad_input),
            "grad_output": (self.grad_output, self.grad_output_for_grad_weight),
        }[role]
        return all(spec.delayed for spec in uses)


def _serves_columns(spec: CastSpec) -> bool:
    """Whether column data are made of row data without rounding again: see `columns`."""
    by_rows = spec.granularity is ScalingGranularity.AXISWISE and spec.power_of_2
    return spec.granularity is TENSORWISE or by_rows


def plan_linear(config: Float8LinearConfig) -> LinearPlan:
    """Resolve `config`; it is frozen, so layers of equal ones share a plan."""
    # Dynamo looks through a cache, but warns of it.
    return _resolved(config) if torch.compiler.is_compiling() else _cached(config)


def _resolved(config: Float8LinearConfig) -> LinearPlan:
    def cast(site: CastSite) -> CastSpec:
        cast_config = config.cast_config(site)
        return CastSpec(
            cast_config.target_dtype or E4M3,
            cast_config.scaling_granularity,
            cast_config.scaling_type,
            config.round_scales_to_power_of_2,
        )

    def gemm(name: str) -> Gemm | None:
        if not config.runs_in_float8(name):
            return None
        a, b = (config.cast_config(site).scaling_granularity for site in GEMM_OPERANDS[name])
        fast = getattr(config, f"gemm_config_{name}").use_fast_accum
        return Gemm(fast, config.emulate, (a, b))

    def shared(site: CastSite) -> bool:
        return config.owner(site) is BASE_SITE[site]

    return LinearPlan(
        **{site.value: cast(site) for site in CAST_SITES},
        share_input=shared(CastSite.INPUT_FOR_GRAD_WEIGHT),
        share_weight=shared(CastSite.WEIGHT_FOR_GRAD_INPUT),
        share_grad_output=shared(CastSite.GRAD_OUTPUT_FOR_GRAD_WEIGHT),
        output=gemm("output"),
        grad_input=gemm("grad_input"),
        grad_weight=gemm("grad_weight"),
        pad=config.pad_inner_dim,
        alignment=config.alignment,
    )


_cached = functools.cache(_resolved)
