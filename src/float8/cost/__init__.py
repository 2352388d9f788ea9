"""A model of what a linear layer costs in bf16 and in float8, without running it."""

from float8.cost.ceilings import KNOWN, Ceilings, ceilings_by_device_name, ceilings_of
from float8.cost.linear import LinearCost, cast_bytes, gemm_ms, linear_cost
from float8.cost.rest import rest_ms

__all__ = [
    "KNOWN",
    "Ceilings",
    "LinearCost",
    "cast_bytes",
    "ceilings_by_device_name",
    "ceilings_of",
    "gemm_ms",
    "linear_cost",
    "rest_ms",
]
