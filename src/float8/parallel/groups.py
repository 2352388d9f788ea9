"""The ranks that share the amaxes of a sync, and whether they hold the same layers."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from float8.tensor import Float8Tensor, is_dtensor, local_tensor


def mesh_device_type(weights: Iterable[Any]) -> str | None:
    """Return the device type of the mesh of `weights`, which may be on the CPU themselves."""
    return next((mesh.device_type for mesh in _meshes(weights)), None)


def _meshes(tensors: Iterable[Any]) -> set[Any]:
    # Gathered under tensor parallel, a weight knows the mesh of that only, not of FSDP2.
    sharded = [x for x in tensors if is_dtensor(x)]
    return {x.device_mesh for x in sharded if not isinstance(local_tensor(x), Float8Tensor)}


def _require_whole_weights(shard_groups: Iterable[Any], got: list[int], what: str) -> None:
    """Raise a `ValueError` if ranks that hold parts of a weight would get different scales."""
    for ranks in map(dist.get_process_group_ranks, shard_groups):
        if not set(ranks) <= set(got):
            raise ValueError(
                f"group: got {what} {got}, but parts of a weight are on ranks {ranks}, which share "
                f"its scales; give a group of all ranks that train on parts of the same batch"
            )


def sync_groups(
    weights: list[Any], group: Any, others: Iterable[Any], shard_groups: Iterable[Any]
) -> tuple[Any, ...]:
    """Return the groups over which the amaxes of layers with these weights are reduced.

    `group`: the only one, or None. `others` tell the mesh where all weights are gathered.
    `shard_groups`: groups of ranks that hold parts of a weight.
    """
    if group is not None:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: got {type(group).__name__}, expected a ProcessGroup or None")
        _require_whole_weights(shard_groups, dist.get_process_group_ranks(group), "ranks")
        return (group,)
    meshes = _meshes(weights) or _meshes(others)
    if len(meshes) > 1:
        got = f"got layers on {len(meshes)} different meshes, expected one for all"
        raise ValueError(f"model: {got}; say which ranks share their amaxes with `group=`")
    for mesh in meshes:
        if mesh.size() < dist.get_world_size():
            here = mesh.mesh.flatten().tolist()
            _require_whole_weights(shard_groups, here, "None and weights on a mesh of ranks")
            return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    if dist.get_world_size() == 1:
        return ()
    if not meshes and any(isinstance(local_tensor(w), Float8Tensor) for w in weights):
        raise ValueError(
            "model: got weights that are gathered at the moment, expected shards, which tell the "
            "ranks; call reshard() on the modules that keep their weights, or give a `group=`"
        )
    return (dist.group.WORLD,)


def unlike(texts: Sequence[str], groups: Sequence[Any], device: torch.device) -> list[str] | None:
    """Return texts of this rank that others of `groups` lack in their place; None: all are alike.

    Only digests are sent, on a `device` on which the groups reduce.
    """

    def largest(numbers: list[int]) -> list[int]:
        found = torch.tensor(numbers, device=device)
        for group in groups:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return found.tolist()

    (count,) = largest([len(texts)])
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    mine = [int.from_bytes(digest[:7], "big") for digest in digests] + [0] * (count - len(texts))
    found = largest(mine + [-x for x in mine])
    same = [most == -least for most, least in zip(found[:count], found[count:], strict=True)]
    return None if all(same) else [x for x, alike in zip(texts, same, strict=False) if not alike]
