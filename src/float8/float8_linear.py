"""`float8.Float8Linear`, under the module name that torchao has for it."""

from float8.linear import Float8Linear as Float8Linear
