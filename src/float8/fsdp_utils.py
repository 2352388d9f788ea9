"""`float8.precompute_float8_dynamic_scale_for_fsdp`, under torchao's module name."""

from float8.fsdp.weights import (
    precompute_float8_dynamic_scale_for_fsdp as precompute_float8_dynamic_scale_for_fsdp,
)
