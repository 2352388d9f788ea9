"""`float8.Float8Tensor`, under the module name and class name that torchao has for it."""

from float8.tensor import Float8Tensor as Float8TrainingTensor

__all__ = ["Float8TrainingTensor"]
