"""Amaxes of tensors that several ranks hold parts of, as code that compilers follow."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from float8.config import ScalingGranularity
from float8.quantize.history import DelayedScale
from float8.quantize.spec import CastSpec

Groups = tuple[str, ...]
"""Names of process groups, over one after the other of which a tensor is spread."""


class Across(NamedTuple):
    """Over which groups the tensors of one layer are spread."""

    input: Groups = ()
    weight: Groups = ()
    grad_output: Groups = ()


HERE = Across()


def reduction(
    groups: Groups, spec: CastSpec, state: DelayedScale | None = None
) -> Callable[[Tensor], Tensor] | None:
    """What `quantize` takes as `reduce`; None where scales come from what is on this rank."""
    if not groups or state is not None or spec.granularity is not ScalingGranularity.TENSORWISE:
        return None
    return functools.partial(amax_across, groups)


def amax_across(groups: Groups, amax: Tensor) -> Tensor:
    """The maximum of the amaxes of all ranks, float32; a NaN on one rank is a NaN on all."""
    # A maximum of floats does not promise that, one of their bits does: see `all_reduce_amax`.
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    for group in groups:
        bits = torch.ops._c10d_functional.all_reduce(bits, "max", group)
        bits = torch.ops._c10d_functional.wait_tensor(bits)
    return bits.view(torch.float32)
