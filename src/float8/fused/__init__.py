"""Producers fused with the casts that follow them, and layers whose input is kept anyway.

Plain functions that a model calls where it would call its layers; nothing is patched.
"""

from float8.fused.feed_forward import swiglu_feed_forward
from float8.fused.kept_input import linear_keeping_input
from float8.fused.norm_linear import rms_norm_linear
from float8.fused.reasons import why_not_fused

__all__ = ["linear_keeping_input", "rms_norm_linear", "swiglu_feed_forward", "why_not_fused"]
