"""`float8.Float8Tensor`, in the module of float8_experimental that has it."""

from float8.tensor import Float8Tensor as Float8Tensor
