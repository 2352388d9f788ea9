"""`float8.Float8Tensor`, in the module and by the name that torchao has for it."""

from float8.tensor import Float8Tensor as Float8TrainingTensor

__all__ = ["Float8TrainingTensor"]
