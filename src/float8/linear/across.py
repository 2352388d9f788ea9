"""What one layer asks of other ranks, as code that compilers follow.

Amaxes of whole tensors, of which each rank holds a part; tokens that ranks gather, or sum up.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from float8.autograd import own

Reduction = Callable[[Tensor], Tensor]


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
        """[R / ranks, C] of each rank, of any dtype that the group can send -> [R, C]."""
        x = x.contiguous()
        whole = torch.ops._c10d_functional.all_gather_into_tensor(x, self.ranks, self.group)
        whole = torch.ops._c10d_functional.wait_tensor(whole)
        return self._swapped(whole, self.ranks, self.before)

    def scatter(self, x: Tensor) -> Tensor:
        """[R, C] of each rank, to be summed -> [R / ranks, C] of the sum."""
        x, group = self._swapped(x, self.before, self.ranks).contiguous(), self.group
        mine = torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", self.ranks, group)
        return _waited(mine)

    def _swapped(self, x: Tensor, first: int, second: int) -> Tensor:
        if 1 in (first, second):
            return x
        return x.view(first, second, -1, x.shape[1]).transpose(0, 1).reshape(x.shape)


class Copies(NamedTuple):
    """Rows [R, C] of a tensor that is replicated: each rank has all of them."""

    group: str

    def scatter(self, x: Tensor) -> Tensor:
        """[R, C] of each rank, to be summed -> the sum."""
        return _waited(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.group))


def _waited(x: Tensor) -> Tensor:
    """`x` when it is there, as another tensor: waiting returns the very `x`."""
    return own(torch.ops._c10d_functional.wait_tensor(x))


class Across(NamedTuple):
    """What one layer asks of other ranks; None: nothing."""

    input: Reduction | None = None
    """Takes the amax of this rank's part of the input, and returns that of the whole input."""
    weight: Reduction | None = None
    """The same for the weight."""
    grad_output: Reduction | None = None
    """The same for the gradient of the output."""
    output: Tokens | None = None
    """Where the output is a sum over ranks, of which each keeps its tokens."""
    weight_scale: Tensor | None = None
    """That of the whole weight, if all ranks were asked for it already."""


HERE = Across()


def reduction(groups: Sequence[str]) -> Reduction:
    """What makes an amax the largest of all ranks of groups: one group after the other."""
    return functools.partial(_amax_across, tuple(groups))


def _amax_across(groups: tuple[str, ...], amax: Tensor) -> Tensor:
    # A maximum of floats does not promise that a NaN on one rank is a NaN on all. One of their bit
    # patterns does: see `all_reduce_amax`.
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    for group in groups:
        bits = torch.ops._c10d_functional.all_reduce(bits, "max", group)
        bits = torch.ops._c10d_functional.wait_tensor(bits)
    return bits.view(torch.float32)
