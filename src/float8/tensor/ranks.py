"""Ranks that hold parts of one tensor: DTensors, amaxes of the whole, tokens that ranks share.

DTensors and FSDP2 are known by their attributes: they import slowly. Compilers follow this code.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX
from float8.quantize import Cast, padded, quantize
from float8.scales import Operand


class SharedTokens(NamedTuple):
    """A tensor sharded along a leading dim, as rows [R, C]: each rank holds R / ranks of them."""

    group: str  # the name of the ranks' process group
    ranks: int
    dim: int  # along which the tensor is sharded
    before: int  # the product of the dims before that one

    def gather(self, x: Tensor) -> Tensor:
        """Gather [R / ranks, C] of each rank, float8 or any that the group can send, to [R, C]."""
        sent = x.contiguous()
        if sent.is_cpu and x.dtype in FLOAT8_MAX:
            sent = sent.view(torch.uint8)  # Gloo has no float8, async TP no uint8
        whole = torch.ops._c10d_functional.all_gather_into_tensor(sent, self.ranks, self.group)
        whole = torch.ops._c10d_functional.wait_tensor(whole).view(x.dtype)
        return whole if self.before == 1 else self._swapped(whole, self.ranks, self.before)

    def gathered(self, x: Tensor, cast: Cast, traced: bool = False) -> Operand:
        """Cast [R / ranks, C] of this rank, and gather the bytes of all: row data [R, ceil16(C)].

        Scales of rows are gathered, too. `traced`: see `quantize`.
        """
        data, scale = quantize(x, cast, row=True, traced=traced).row
        granularity = cast.how.scaling_granularity
        scale = scale if granularity.one_scale else self.gather(scale)
        whole = Operand(self.gather(data[:, : x.shape[1]]), scale)
        return padded(whole, granularity, pad_rows=False)

    def start_reduce_scatter(self, x: Tensor) -> Tensor:
        """Start to sum up [R, C] of all ranks; `finished` returns [R / ranks, C] of this one."""
        x = x if self.before == 1 else self._swapped(x, self.before, self.ranks)
        return torch.ops._c10d_functional.reduce_scatter_tensor(  # type: ignore[no-any-return]
            x.contiguous(), "sum", self.ranks, self.group
        )

    def _swapped(self, x: Tensor, first: int, second: int) -> Tensor:
        return x.view(first, second, -1, x.shape[1]).transpose(0, 1).reshape(x.shape)


def finished(x: Tensor) -> Tensor:
    """Wait for what `SharedTokens.start_reduce_scatter` started, and return it."""
    x = torch.ops._c10d_functional.wait_tensor(x)
    # As another tensor: waiting returns the very one that it was given.
    return torch.ops.aten._unsafe_view.default(x, x.shape)  # type: ignore[no-any-return]


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor."""
    return hasattr(x, "device_mesh")


def local_tensor(x: Any) -> Any:
    """Return the shard of a DTensor; anything else as it is."""
    return getattr(x, "_local_tensor", x)


def dtensor_like(local: Any, like: Any) -> Any:
    """Return `local` as this rank's part of a DTensor with shape and placements of `like`."""
    whole = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return type(like).from_local(local, like.device_mesh, like.placements, **whole)


def is_fsdp_module(module: Any) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    return hasattr(type(module), "reshard")


def reshard(model: Any) -> None:
    """Let go of what FSDP2 keeps gathered, as `model.state_dict()` does."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()


def sharding_groups(x: Any) -> tuple[Any, ...]:
    """Return the groups over which parts of a DTensor are spread: one per mesh dim that shards it.

    Under FSDP2 with tensor parallel there are two: reduce over both to get the amax of the whole.
    """
    mesh, placed = x.device_mesh, enumerate(x.placements)
    dims = [dim for dim, placement in placed if not placement.is_replicate() and mesh.size(dim) > 1]
    return tuple([mesh.get_group(dim) for dim in dims])


def all_have_some(size: int, ranks: int) -> bool:
    """Whether none of torch's chunks is empty: all but the last are as long as the first."""
    return -(-size // ranks) * (ranks - 1) < size


def all_ranks_have_some(x: Any) -> bool:
    """Whether each rank has some of a DTensor; no write changes the version of an empty shard."""
    ranks: dict[int, int] = {}  # over how many each dim is sharded
    for mesh_dim, placement in enumerate(x.placements):
        if not placement.is_replicate():
            ranks[placement.dim] = ranks.get(placement.dim, 1) * x.device_mesh.size(mesh_dim)
    return all(all_have_some(x.shape[dim], over) for dim, over in ranks.items())


def amax_over(groups: Iterable[Any], device_type: str | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that makes amaxes the largest of all ranks of some process groups.

    `device_type`: where the groups reduce, as amaxes may be offloaded; None: where these are.
    """
    names = tuple([group.group_name for group in groups])
    return functools.partial(_amax_over, names, device_type)


def _amax_over(groups: tuple[str, ...], device_type: str | None, amax: Tensor) -> Tensor:
    # A NaN on one rank is a NaN on all, which a maximum of floats does not promise: it is one of
    # their bit patterns, whose order is that of the numbers, with NaN above all, without its sign.
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    if device_type not in (None, amax.device.type):
        bits = bits.to(device_type)
    for group in groups:
        bits = torch.ops._c10d_functional.all_reduce(bits, "max", group)
        bits = torch.ops._c10d_functional.wait_tensor(bits)
    return bits.to(amax.device).view(torch.float32)
