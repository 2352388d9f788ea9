"""`float8.precompute_float8_dynamic_scale_for_fsdp`, in the module of torchao that has it."""

from float8.parallel.fsdp import (
    precompute_float8_dynamic_scale_for_fsdp as precompute_float8_dynamic_scale_for_fsdp,
)
