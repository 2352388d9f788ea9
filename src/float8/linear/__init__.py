"""`Float8Linear`: the module, its autograd function and its delayed-scaling state."""

from float8.linear.float8_linear import Float8Linear
from float8.linear.source import move_hooks, unsupported
from float8.linear.state import (
    StackedState,
    amax_name,
    amax_names,
    buffer_names,
    is_current,
    scale_name,
    stack_state,
)

__all__ = [
    "Float8Linear",
    "StackedState",
    "amax_name",
    "amax_names",
    "buffer_names",
    "is_current",
    "move_hooks",
    "scale_name",
    "stack_state",
    "unsupported",
]
