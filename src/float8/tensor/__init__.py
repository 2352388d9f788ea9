"""`Float8Tensor` and its ops; weights that are gathered in float8."""

from float8.tensor import ops  # noqa: F401  registers the op handlers
from float8.tensor.dtensor import dtensor_like, is_dtensor, is_fsdp_module, local_tensor, reshard
from float8.tensor.float8_tensor import Float8Tensor, dequantise
from float8.tensor.gather import Float8GatherWeight, gathered_like, high_precision

__all__ = [
    "Float8GatherWeight",
    "Float8Tensor",
    "dequantise",
    "dtensor_like",
    "gathered_like",
    "high_precision",
    "is_dtensor",
    "is_fsdp_module",
    "local_tensor",
    "reshard",
]
