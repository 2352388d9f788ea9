"""Kernels: amax, the float8 cast and the byte transpose, each with a plain-torch twin.

Importing registers the ops ``torch.ops.float8.{amax, cast, transpose}`` and does nothing else.
"""

from float8.kernels import ops  # noqa: F401  registers the ops
from float8.kernels.amax import amax
from float8.kernels.cast import cast
from float8.kernels.layout import ceil16
from float8.kernels.transpose import transpose_bytes

__all__ = ["amax", "cast", "ceil16", "transpose_bytes"]
