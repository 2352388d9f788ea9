"""Triton kernels and their plain-torch twins: one file for each op of ``torch.ops.float8``."""

from float8.kernels.amax import amax
from float8.kernels.cast import cast, to_float8
from float8.kernels.transpose import transpose_bytes

__all__ = ["amax", "cast", "to_float8", "transpose_bytes"]
