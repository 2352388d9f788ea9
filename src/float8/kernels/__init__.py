"""Kernels and their plain-torch twins, registered as ``torch.ops.float8.*``, one op per file."""

from float8.kernels.amax import amax
from float8.kernels.cast import cast, to_float8
from float8.kernels.transpose import transpose_bytes

__all__ = ["amax", "cast", "to_float8", "transpose_bytes"]
