"""`Float8Tensor`; weights that are gathered in float8; DTensors."""

from float8.tensor.float8_tensor import Float8Tensor, dequantise
from float8.tensor.gather import Float8GatherWeight, gathered_like, high_precision
from float8.tensor.ranks import dtensor_like, is_dtensor, is_fsdp_module, local_tensor, reshard

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
