"""Kernels: amax, the float8 casts, the byte transpose; with plain twins.

One operation, one file: what it computes, its plain-torch twin, its Triton code, its registration
as ``torch.ops.float8.*``. Importing registers the ops and does nothing else.
"""

from float8.kernels.amax import amax
from float8.kernels.cast import cast, to_float8
from float8.kernels.transpose import transpose_bytes

__all__ = ["amax", "cast", "to_float8", "transpose_bytes"]
