"""`Float8Linear`: the module, its autograd function and its delayed-scaling state."""

from float8.linear.delayed import DelayedSite, amax_name, amax_names, scale_name
from float8.linear.float8_linear import Float8Linear
from float8.linear.functional import linear
from float8.linear.source import move_hooks, unsupported

__all__ = [
    "DelayedSite",
    "Float8Linear",
    "amax_name",
    "amax_names",
    "linear",
    "move_hooks",
    "scale_name",
    "unsupported",
]
