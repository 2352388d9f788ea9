"""Frozen dataclasses that say how a linear layer runs in float8."""

from float8.config.casting import (
    CastConfig,
    DelayedScalingConfig,
    Granularity,
    ScalingGranularity,
    ScalingType,
)
from float8.config.linear import (
    BASE_SITE,
    CAST_SITES,
    GEMM_OPERANDS,
    RECIPES,
    CastSite,
    ConfigOrRecipe,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    Float8Weights,
    as_config,
    linear_requires_sync,
)
from float8.formats import E4M3 as e4m3_dtype  # noqa: N811  names of torchao
from float8.formats import E5M2 as e5m2_dtype  # noqa: N811

__all__ = [
    "BASE_SITE",
    "CAST_SITES",
    "GEMM_OPERANDS",
    "RECIPES",
    "CastConfig",
    "CastSite",
    "ConfigOrRecipe",
    "DelayedScalingConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Float8Weights",
    "Granularity",
    "ScalingGranularity",
    "ScalingType",
    "as_config",
    "e4m3_dtype",
    "e5m2_dtype",
    "linear_requires_sync",
]
