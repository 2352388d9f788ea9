"""Training on several devices: float8 all-gather under FSDP2, and amaxes across ranks.

It stands below `convert`, which gives weights the class that FSDP2 gathers in float8, and `sync`.
"""

from float8.parallel.amax import all_reduce_amax, mesh_device_type, sync_groups
from float8.parallel.ddp import keep_amaxes_under_ddp
from float8.parallel.fsdp import (
    check_gatherable,
    enable_float8_all_gather,
    precompute_float8_dynamic_scale_for_fsdp,
    shard_amax,
)

__all__ = [
    "all_reduce_amax",
    "check_gatherable",
    "enable_float8_all_gather",
    "keep_amaxes_under_ddp",
    "mesh_device_type",
    "precompute_float8_dynamic_scale_for_fsdp",
    "shard_amax",
    "sync_groups",
]
