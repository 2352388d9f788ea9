"""Kernels: amax, the float8 casts, the byte transpose, RMSNorm and SwiGLU; with plain twins.

One operation, one file: what it computes, its plain-torch twin, its Triton code, its registration
as ``torch.ops.float8.*``. Importing registers the ops and does nothing else.
"""

from float8.kernels.amax import amax
from float8.kernels.cast import cast, cast_delayed, to_float8
from float8.kernels.cast_finer import cast_finer
from float8.kernels.rms_norm import WIDEST_NORM, rms_norm_backward, rms_norm_cast, rms_norm_recast
from float8.kernels.swiglu import swiglu_backward_cast, swiglu_cast
from float8.kernels.transpose import transpose_bytes

__all__ = [
    "WIDEST_NORM",
    "amax",
    "cast",
    "cast_delayed",
    "cast_finer",
    "rms_norm_backward",
    "rms_norm_cast",
    "rms_norm_recast",
    "swiglu_backward_cast",
    "swiglu_cast",
    "to_float8",
    "transpose_bytes",
]
