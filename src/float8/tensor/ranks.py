"""Helpers for DTensors and FSDP2, found by attributes (imports are slow); compilers trace them."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX
from float8.quantize import Cast, padded, quantize
from float8.scales import Operand


class SharedTokens(NamedTuple):
    """All-gathers and reduce-scatters activations that are sharded evenly along a leading dim.

    Fields: the name of the process group, the number of `ranks` in it, the sharded dim, and the
    product of the sizes of all dims before that. Methods take activations as matrices: the leading
    dims are flattened to R rows for all ranks, R / ranks on each.
    """

    group: str
    ranks: int
    dim: int
    before: int

    def gather(self, x: Tensor) -> Tensor:
        """All-gather `x` [R / ranks, C] to [R, C], with rows ordered as in the whole activation."""
        sent = x.contiguous()
        if sent.is_cpu and x.dtype in FLOAT8_MAX:
            sent = sent.view(torch.uint8)  # Gloo cannot send float8; async TP cannot send uint8
        whole = torch.ops._c10d_functional.all_gather_into_tensor(sent, self.ranks, self.group)
        whole = torch.ops._c10d_functional.wait_tensor(whole).view(x.dtype)  # in the order of ranks
        return whole if self.before == 1 else self._swapped(whole, self.ranks, self.before)

    def gathered(self, x: Tensor, cast: Cast, traced: bool = False) -> Operand:
        """Quantize this rank's rows `x` [R / ranks, C]; return all ranks' data [R, C] and scales.

        `cast` has one scale per row, or one that must be equal on all ranks: set, or computed from
        an amax by `cast.reduce`. C is zero-padded to a multiple of 16. In compiled code, `traced`
        lets a compiler fuse the amax (of scales per row, the cast) with the ops that compute `x`.
        """
        data, scale = quantize(x, cast, row=True, traced=traced).row
        granularity = cast.config.scaling_granularity
        scale = scale if granularity.one_scale else self.gather(scale)
        data = self.gather(data[:, : x.shape[1]])  # padding is not sent
        return padded(Operand(data, scale), granularity, pad_rows=False)

    def start_reduce_scatter(self, x: Tensor) -> Tensor:
        """Start to reduce-scatter `x` [R, C]; `finished(result)` has [R / ranks, C] of the sum."""
        x = x if self.before == 1 else self._swapped(x, self.before, self.ranks)
        reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor
        return reduce_scatter(x.contiguous(), "sum", self.ranks, self.group)  # type: ignore[no-any-return]

    def _swapped(self, x: Tensor, first: int, second: int) -> Tensor:
        return x.view(first, second, -1, x.shape[1]).transpose(0, 1).reshape(x.shape)


def finished(x: Tensor) -> Tensor:
    """Wait for `x`, a result of `SharedTokens.start_reduce_scatter`, and return an alias of it."""
    x = torch.ops._c10d_functional.wait_tensor(x)  # returns `x` itself; see `new_alias`
    return torch.ops.aten._unsafe_view.default(x, x.shape)  # type: ignore[no-any-return]


def is_dtensor(x: Any) -> bool:
    """Return whether `x` is a DTensor."""
    return hasattr(x, "device_mesh")


def local_tensor(x: Any) -> Any:
    """Return this rank's part of the DTensor `x`, without autograd; return other `x` unchanged."""
    return getattr(x, "_local_tensor", x)


def dtensor_like(local: Tensor, template: Any) -> Any:
    """Return a DTensor with mesh, placements, shape of `template`; `local` is this rank's part."""
    options = {"shape": template.shape, "stride": template.stride(), "run_check": False}
    return type(template).from_local(local, template.device_mesh, template.placements, **options)


def is_fsdp_module(module: Any) -> bool:
    """Return whether `fully_shard` was applied to `module` itself."""
    return hasattr(type(module), "reshard")


def reshard(model: Any) -> None:
    """Reshard all FSDP2 modules in `model`, which frees the weights that are gathered now."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()


def sharding_groups(x: Any) -> tuple[Any, ...]:
    """Return process groups of mesh dims of size > 1 along which DTensor `x` is not replicated."""
    mesh, placements = x.device_mesh, enumerate(x.placements)
    dims = [dim for dim, placed in placements if not placed.is_replicate() and mesh.size(dim) > 1]
    return tuple([mesh.get_group(dim) for dim in dims])


def every_rank_gets_some(size: int, ranks: int) -> bool:
    """Return whether every rank gets a row when `torch.chunk` splits `size` rows over `ranks`."""
    return -(-size // ranks) * (ranks - 1) < size


def no_shard_is_empty(x: Any) -> bool:
    """Return whether each rank surely has a part of each sharded dim of `x`, a DTensor."""
    ranks: dict[int, int] = {}  # dim of `x` -> number of ranks that share it
    for mesh_dim, placement in enumerate(x.placements):
        if not placement.is_replicate():
            ranks[placement.dim] = ranks.get(placement.dim, 1) * x.device_mesh.size(mesh_dim)
    return all(every_rank_gets_some(x.shape[dim], count) for dim, count in ranks.items())


def amax_over(groups: Iterable[Any], device_type: str | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that all-reduces amaxes, float32, to maxima over all process `groups`.

    A NaN on one rank becomes NaN on all. If `device_type` is given, amaxes on another device, such
    as offloaded ones, are moved to it for the all-reduces, and the maxima are moved back.
    """
    return functools.partial(_amax_over, tuple([group.group_name for group in groups]), device_type)


def _amax_over(groups: tuple[str, ...], device_type: str | None, amax: Tensor) -> Tensor:
    # Bits order as the numbers do, with NaN above all; a maximum of floats may drop a NaN.
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    if device_type not in (None, amax.device.type):
        bits = bits.to(device_type)
    for group in groups:
        bits = torch.ops._c10d_functional.all_reduce(bits, "max", group)
        bits = torch.ops._c10d_functional.wait_tensor(bits)
    return bits.to(amax.device).view(torch.float32)
