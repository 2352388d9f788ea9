"""Producers fused with the casts that follow them.

Plain functions that a model calls where it would call its layers; nothing is patched.
"""

from float8.fused.feed_forward import swiglu_feed_forward
from float8.fused.norm_linear import rms_norm_linear
from float8.fused.reasons import why_not_fused

__all__ = ["rms_norm_linear", "swiglu_feed_forward", "why_not_fused"]
