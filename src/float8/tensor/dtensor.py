"""DTensors and FSDP2 by their attributes: importing them takes longer than importing float8."""

from typing import Any

import torch
from torch import Tensor


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor."""
    return hasattr(x, "device_mesh")


def local_tensor(x: Any) -> Any:
    """The shard of a DTensor; anything else as it is."""
    return getattr(x, "_local_tensor", x)


def dtensor_like(local: Any, like: Any) -> Any:
    """`local` as this rank's part of a DTensor of the shape and placements of `like`."""
    return type(like).from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def whole_amax(amax: Tensor, like: Any) -> Tensor:
    """Return the amax of a whole DTensor, placed as `like`, of those of its parts; collective.

    Through bit patterns, as a maximum of floats does not promise that a NaN on one rank is one on
    all.
    """
    dtensors = torch.distributed.tensor  # imported: somebody made `like`
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    parts = [
        dtensors.Partial("max") if placement.is_shard() else dtensors.Replicate()
        for placement in like.placements
    ]
    whole: Any = dtensors.DTensor.from_local(bits, like.device_mesh, parts, run_check=False)
    return whole.full_tensor().view(torch.float32)  # type: ignore[no-any-return]


def is_fsdp_module(module: Any) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    return hasattr(type(module), "reshard")
