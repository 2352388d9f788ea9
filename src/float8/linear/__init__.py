"""`Float8Linear`: the module, its autograd function and its delayed-scaling state."""

from float8.linear.classes import computes_something_else, is_conv1d, path
from float8.linear.delayed import WEIGHT_AMAX, WEIGHT_SCALE
from float8.linear.functional import linear
from float8.linear.module import Float8Conv1D, Float8Layer, Float8Linear, unsupported
from float8.linear.source import move_hooks, replaced_forward

__all__ = [
    "WEIGHT_AMAX",
    "WEIGHT_SCALE",
    "Float8Conv1D",
    "Float8Layer",
    "Float8Linear",
    "computes_something_else",
    "is_conv1d",
    "linear",
    "move_hooks",
    "path",
    "replaced_forward",
    "unsupported",
]
