"""See `float8.Float8Tensor`."""

from float8.tensor import Float8Tensor as Float8TrainingTensor

__all__ = ["Float8TrainingTensor"]
