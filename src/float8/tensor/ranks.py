"""Ranks that hold parts of one tensor: amaxes of the whole, and tokens that they gather or sum up.

Code that compilers follow.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.autograd import own


class Tokens(NamedTuple):
    """Rows [R, C]: the flattened leading dims of a tensor that is sharded along one of them."""

    group: str
    """The name of the ranks' process group."""

    ranks: int
    dim: int
    """Along which the tensor is sharded."""

    before: int
    """The product of the dims before that one."""

    def gather(self, x: Tensor) -> Tensor:
        """Gather [R / ranks, C] of each rank, of any dtype that the group can send, to [R, C]."""
        x = x.contiguous()
        whole = torch.ops._c10d_functional.all_gather_into_tensor(x, self.ranks, self.group)
        whole = torch.ops._c10d_functional.wait_tensor(whole)
        return self._swapped(whole, self.ranks, self.before)

    def scatter(self, x: Tensor) -> Tensor:
        """Sum up [R, C] of all ranks, of which this rank gets [R / ranks, C]."""
        x, group = self._swapped(x, self.before, self.ranks).contiguous(), self.group
        mine = torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", self.ranks, group)
        # As another tensor: waiting returns the very one that it was given.
        return own(torch.ops._c10d_functional.wait_tensor(mine))

    def _swapped(self, x: Tensor, first: int, second: int) -> Tensor:
        if 1 in (first, second):
            return x
        return x.view(first, second, -1, x.shape[1]).transpose(0, 1).reshape(x.shape)


def sharding_groups(x: Any) -> tuple[Any, ...]:
    """Return the groups over which parts of a DTensor are spread: one per mesh dim that shards it.

    Under FSDP2 with tensor parallel there are two: over both it is the amax of the whole.
    """
    mesh, groups = x.device_mesh, []
    for dim, placement in enumerate(x.placements):
        if not placement.is_replicate() and mesh.size(dim) > 1:
            groups.append(mesh.get_group(dim))
    return tuple(groups)


def amax_over(groups: Iterable[Any], device_type: str | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that makes amaxes the largest of all ranks of some process groups.

    Args:
        groups: over which to reduce, one after the other.
        device_type: where they can, as amaxes may be offloaded; None: where the amaxes are.
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
