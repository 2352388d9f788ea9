"""`float8.Float8Linear`, in the module of torchao that has it."""

from float8.linear import Float8Linear as Float8Linear
