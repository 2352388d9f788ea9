"""Memory: what is kept from forward to backward, and the peak of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(forward: Callable[[], object], known: Iterable[Tensor]) -> int:
    """Bytes that `forward` keeps for backward, each storage once.

    Args:
        forward: Runs a forward pass and returns its result.
        known: Tensors that are there anyway, such as parameters: not counted.
    """
    there = {tensor.untyped_storage().data_ptr() for tensor in known}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result  # until here it kept what was saved, so that no address was used twice
    return sum(saved.values())


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Most memory in use during `step` over what was in use before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    resting = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - resting
