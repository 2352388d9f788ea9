"""See `float8.parallel.fsdp`."""

from float8.parallel.fsdp import precompute_float8_dynamic_scale_for_fsdp

__all__ = ["precompute_float8_dynamic_scale_for_fsdp"]
