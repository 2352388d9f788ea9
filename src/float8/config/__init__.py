"""Frozen dataclasses that say how a linear layer runs in float8."""

from float8.config.casting import CastConfig, DelayedScalingConfig, ScalingGranularity, ScalingType
from float8.config.linear import (
    BASE_SITE,
    CAST_SITES,
    GEMM_OPERANDS,
    CastSite,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    Float8Weights,
    linear_requires_sync,
)

__all__ = [
    "BASE_SITE",
    "CAST_SITES",
    "GEMM_OPERANDS",
    "CastConfig",
    "CastSite",
    "DelayedScalingConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Float8Weights",
    "ScalingGranularity",
    "ScalingType",
    "linear_requires_sync",
]
