"""`Float8Linear`: the module, its autograd function and its delayed-scaling state."""

from float8.linear.delayed import WEIGHT_AMAX, WEIGHT_SCALE
from float8.linear.functional import linear
from float8.linear.module import Float8Linear
from float8.linear.source import move_hooks, unsupported

__all__ = [
    "WEIGHT_AMAX",
    "WEIGHT_SCALE",
    "Float8Linear",
    "linear",
    "move_hooks",
    "unsupported",
]
