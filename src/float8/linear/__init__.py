"""`Float8Linear`: the module, its autograd function and its delayed-scaling state."""

from float8.linear.float8_linear import Float8Linear
from float8.linear.gemm_kernels import LinearKernels, linear_kernels
from float8.linear.source import move_hooks, unsupported
from float8.linear.state import StackedState, buffer_names, is_current, stack_state

__all__ = [
    "Float8Linear",
    "LinearKernels",
    "StackedState",
    "buffer_names",
    "is_current",
    "linear_kernels",
    "move_hooks",
    "stack_state",
    "unsupported",
]
