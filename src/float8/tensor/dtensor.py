"""DTensors and FSDP2 by their attributes: importing them takes longer than importing float8."""

from typing import Any


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor."""
    return hasattr(x, "device_mesh")


def local_tensor(x: Any) -> Any:
    """Return the shard of a DTensor; anything else as it is."""
    return getattr(x, "_local_tensor", x)


def dtensor_like(local: Any, like: Any) -> Any:
    """Return `local` as this rank's part of a DTensor of the shape and placements of `like`."""
    return type(like).from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def is_fsdp_module(module: Any) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    return hasattr(type(module), "reshard")


def reshard(model: Any) -> None:
    """Let go of what FSDP2 keeps gathered, as `model.state_dict()` does."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()


def all_have_some(size: int, ranks: int) -> bool:
    """Whether each rank has some of a dim in torch's chunks: all but the last as long as the first.

    Behind the last there may be empty ones.
    """
    return -(-size // ranks) * (ranks - 1) < size
