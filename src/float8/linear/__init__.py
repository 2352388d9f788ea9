"""`Float8Linear`: the module, its autograd function and its delayed-scaling state."""

from float8.linear.float8_linear import Float8Linear, unsupported
from float8.linear.state import StackedState, buffer_names, is_current, stack_state

__all__ = [
    "Float8Linear",
    "StackedState",
    "buffer_names",
    "is_current",
    "stack_state",
    "unsupported",
]
