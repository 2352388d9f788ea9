"""Bytes that one rank sends: collectives, counted as they are called."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NO_DATA = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")
_KINDS = {"allgather": "gathered", "reducescatter": "reduce_scattered", "allreduce": "all_reduced"}


class CountedTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives of this thread and its backward passes, by whatever name they are called.

    `traffic` has the bytes of the whole tensors that they were about, the own part included: the
    results of all-gathers as `gathered`, the inputs of reduce-scatters as `reduce_scattered`, the
    tensors of all-reduces as `all_reduced`, and as `other` whatever else was sent or received;
    `all_reduces` is how many there were. Compiled code stays compiled.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = True  # they pass through, as all else
        self.traffic: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled run as it is; else torch would fall back to eager mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count it, if it is a collective."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a subclass: what it calls for its parts comes by once more
        result = func(*args, **(kwargs or {}))
        space, _, name = func.name().partition("::")
        if space not in _NAMESPACES or name.split(".")[0] in _NO_DATA:
            return result
        name = name.replace("_", "")
        kind = next((_KINDS[key] for key in _KINDS if key in name), "other")
        # Functional ones return what others write into their first argument.
        functional = space != _NAMESPACES[0]
        about = args[kind == "reduce_scattered" and not functional]
        whole = result if functional and kind == "gathered" else about
        self.traffic[kind] += sum(t.nbytes for t in tree_leaves(whole) if isinstance(t, Tensor))
        self.traffic["all_reduces"] += kind == "all_reduced"
        return result
