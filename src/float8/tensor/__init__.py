"""`Float8Tensor` and what each op does to it; weights that are gathered in float8."""

from float8.tensor import ops  # noqa: F401  registers the op handlers
from float8.tensor.dtensor import local_tensor
from float8.tensor.float8_tensor import Float8Tensor, dequantise
from float8.tensor.gather_plain import high_precision, with_plan_of
from float8.tensor.gather_plan import GatherPlan
from float8.tensor.gather_scale import PrecomputedScale
from float8.tensor.gather_weight import Float8GatherWeight

__all__ = [
    "Float8GatherWeight",
    "Float8Tensor",
    "GatherPlan",
    "PrecomputedScale",
    "dequantise",
    "high_precision",
    "local_tensor",
    "with_plan_of",
]
