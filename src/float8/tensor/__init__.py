"""`Float8Tensor` and what each op does to it."""

from float8.tensor import ops  # noqa: F401  registers the op handlers
from float8.tensor.float8_tensor import Float8Tensor, dequantise

__all__ = ["Float8Tensor", "dequantise"]
