"""Texts of ranks, compared and exchanged as tensors.

`torch.distributed` sends objects through NumPy, which users need not have.
"""

import hashlib
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from float8.parallel.amax import Group


def all_gather_texts(text: str, groups: Sequence[Group], device: torch.device) -> set[str]:
    """Return all texts that the ranks of `groups`, the dims of one mesh, hold.

    Where they are the same, which is the rule, only a digest travels. `device` is one on which the
    groups can reduce and gather.
    """
    digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()))
    largest = torch.stack([digest, -digest]).to(device)
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    most, least = largest.cpu()
    if torch.equal(most, -least):
        return {text}
    found = {text}
    for group in groups:
        gathered = _all_gather_bytes(json.dumps(sorted(found)).encode(), group, device)
        found = {one for each in gathered for one in json.loads(each)}
    return found


def _all_gather_bytes(mine: bytes, group: Group, device: torch.device) -> list[bytes]:
    """Return the bytes of each rank of `group`, by rank."""
    longest = torch.tensor(len(mine), device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    padded = mine.ljust(int(longest))  # with spaces, which JSON does not read
    sent = torch.tensor(list(padded), dtype=torch.uint8, device=device)
    received: list[Tensor] = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    return [bytes(each.tolist()) for each in received]
