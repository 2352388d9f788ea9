"""See `float8.Float8Linear`."""

from float8.linear import Float8Linear

__all__ = ["Float8Linear"]
