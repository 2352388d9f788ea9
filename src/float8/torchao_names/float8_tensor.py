"""See `float8.Float8Tensor`."""

from float8.tensor import Float8Tensor

__all__ = ["Float8Tensor"]
