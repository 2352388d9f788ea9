"""Experts: linear layers with one weight for each group of rows."""

from float8.experts.functional import grouped_linear
from float8.experts.gather import GatherExperts
from float8.experts.module import (
    ExpertsWeight,
    Float8Experts,
    convert_experts,
    kind_of,
    names_to_gather,
    unsupported_experts,
    weights_of,
)

__all__ = [
    "ExpertsWeight",
    "Float8Experts",
    "GatherExperts",
    "convert_experts",
    "grouped_linear",
    "kind_of",
    "names_to_gather",
    "unsupported_experts",
    "weights_of",
]
