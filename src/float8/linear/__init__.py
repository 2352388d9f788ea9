"""`Float8Linear`: the module, its autograd function and its delayed-scaling state."""

from float8.linear.functional import linear
from float8.linear.module import Float8Linear, unsupported
from float8.linear.weight import Float8Module

__all__ = [
    "Float8Linear",
    "Float8Module",
    "linear",
    "unsupported",
]
