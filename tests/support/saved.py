"""What a forward keeps for backward."""

from collections.abc import Callable, Iterable

from torch import Tensor

from support.spies import saved_tensors


def saved_bytes(forward: Callable[[], object], known: Iterable[Tensor]) -> int:
    """Return the bytes that `forward` keeps for backward, each storage once.

    Not counted are tensors `known` to be there anyway, such as parameters.
    """
    there = {tensor.untyped_storage().data_ptr() for tensor in known}
    with saved_tensors() as saved:
        forward()
    storages = [tensor.untyped_storage() for tensor in saved]
    return sum({x.data_ptr(): x.nbytes() for x in storages if x.data_ptr() not in there}.values())
