"""`Float8Linear`: the module, its autograd function and its delayed-scaling state."""

from float8.linear.functional import linear
from float8.linear.module import Float8Conv1D, Float8Layer, Float8Linear, unsupported
from float8.linear.source import is_conv1d
from float8.linear.weight import Float8Module

__all__ = [
    "Float8Conv1D",
    "Float8Layer",
    "Float8Linear",
    "Float8Module",
    "is_conv1d",
    "linear",
    "unsupported",
]
