"""What a forward keeps for backward."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(forward: Callable[[], object], known: Iterable[Tensor]) -> int:
    """Return the bytes that `forward` keeps for backward, each storage once.

    `forward` returns its result. Not counted are tensors `known` to be there anyway, such as
    parameters.
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
