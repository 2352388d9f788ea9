"""`float8.Float8Tensor`, under the module name that float8_experimental has for it."""

from float8.tensor import Float8Tensor as Float8Tensor
