"""DTensors seen from below: what is in one, and one made like another.

By their attributes: importing DTensor takes longer than importing all of float8.
"""

from typing import Any

from torch import Tensor


def local_tensor(x: Any) -> Any:
    """The shard of a DTensor; anything else as it is."""
    return getattr(x, "_local_tensor", x)


def dtensor_like(x: Any, local: Tensor) -> Tensor:
    """A DTensor of the mesh, placements and global shape of `x`; shares the memory of `local`."""
    result: Tensor = type(x).from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
    return result
