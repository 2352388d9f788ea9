"""Process groups over which delayed scaling reduces amaxes, and a check that ranks agree."""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from float8.tensor import Float8Tensor, is_dtensor, local_tensor


def mesh_device_type(weights: Iterable[Any]) -> str | None:
    """Return the device type of the mesh of sharded DTensors in `weights`; None if none is one."""
    return next((mesh.device_type for mesh in _meshes(weights)), None)


def _meshes(tensors: Iterable[Any]) -> set[Any]:
    """Return the meshes of DTensors in `tensors`, except of DTensors of `Float8Tensor`s."""
    # A weight that FSDP2 gathered in float8 has the mesh of tensor parallel, without FSDP2's dims.
    sharded = [x for x in tensors if is_dtensor(x)]
    return {x.device_mesh for x in sharded if not isinstance(local_tensor(x), Float8Tensor)}


def _require_whole_weights(shard_groups: Iterable[Any], synced: list[int], source: str) -> None:
    """Raise `ValueError` if a rank of `shard_groups` is not in `synced`, in texts: `source`."""
    for ranks in map(dist.get_process_group_ranks, shard_groups):
        if not set(ranks) <= set(synced):
            raise ValueError(
                f"group: got {source} {synced}, but parts of a weight are on ranks {ranks}, which "
                f"share its scales; give a group of all ranks that train on parts of the same batch"
            )


def sync_groups(
    weights: list[Any], group: Any, fsdp_params: Iterable[Any], shard_groups: Iterable[Any]
) -> tuple[Any, ...]:
    """Return the process groups over which delayed scaling reduces the amaxes of some layers.

    `(group,)` if that is not None (`TypeError` if no ProcessGroup); else one for each dim of the
    mesh of `weights` (or of `fsdp_params`, Parameters of FSDP2 modules around the layers); without
    a mesh, or if it has all ranks, one of all, or () for one rank. Raises `ValueError` for several
    meshes, gathered weights without one, or omitted ranks in `shard_groups`, which share a weight.
    """
    if group is not None:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: got {type(group).__name__}, expected a ProcessGroup or None")
        _require_whole_weights(shard_groups, dist.get_process_group_ranks(group), "ranks")
        return (group,)
    meshes = _meshes(weights) or _meshes(fsdp_params)
    if len(meshes) > 1:
        got = f"got layers on {len(meshes)} different meshes, expected one for all"
        raise ValueError(f"model: {got}; say which ranks share their amaxes with `group=`")
    for mesh in meshes:  # one at most
        if mesh.size() < dist.get_world_size():  # else return one group of all ranks, below
            mesh_ranks = mesh.mesh.flatten().tolist()
            _require_whole_weights(shard_groups, mesh_ranks, "None and weights on a mesh of ranks")
            return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    if dist.get_world_size() == 1:
        return ()
    if not meshes and any(isinstance(local_tensor(w), Float8Tensor) for w in weights):
        raise ValueError(  # by FSDP2's gather; weights in float8 only are not in `weights`
            "model: got weights that are gathered at the moment, expected shards, which tell the "
            "ranks; call reshard() on the modules that keep their weights, or give a `group=`"
        )
    return (dist.group.WORLD,)


def unlike(texts: Sequence[str], groups: Sequence[Any], device: torch.device) -> list[str] | None:
    """Return the `texts` that a rank of `groups` lacks at that index (or []); None if all agree."""

    def maxima(numbers: list[int]) -> list[int]:
        largest = torch.tensor(numbers, device=device)
        for group in groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return largest.tolist()

    (count,) = maxima([len(texts)])  # of the longest list; shorter lists are padded with 0
    digests = [hashlib.sha256(text.encode()).digest()[:7] for text in texts]  # fit into int64
    numbers = [int.from_bytes(digest, "big") for digest in digests] + [0] * (count - len(texts))
    reduced = maxima(numbers + [-number for number in numbers])  # max(-x) is -min(x)
    largest, smallest = reduced[:count], [-number for number in reduced[count:]]
    differ = [most != least for most, least in zip(largest, smallest, strict=True)]
    return [*itertools.compress(texts, differ)] if any(differ) else None  # []: others have more
