"""What one rank sends: collectives counted as they are called, and the time they stand alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Interval = tuple[float, float]  # start and end of something, in one unit of time

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NO_DATA = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")


@dataclass
class Traffic:
    """Bytes of the whole tensors that collectives of one rank were about, own part included."""

    gathered: int = 0  # results of all-gathers
    reduce_scattered: int = 0  # inputs of reduce-scatters
    all_reduced: int = 0  # tensors of all-reduces
    other: int = 0  # anything else that was sent or received
    all_reduces: int = 0  # how many there were


class CountedTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives of this thread and its backward passes, by whatever name they are called.

    At the level of the operators that reach a process group. Compiled code stays compiled.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = True  # they pass through, as all else
        self.traffic = Traffic()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled run as it is; else torch would fall back to eager mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count it, if it is a collective."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return (
                NotImplemented  # a subclass: what it calls for the parts of it comes by once more
            )
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", None) in _NAMESPACES:
            functional = func.namespace != _NAMESPACES[0]
            name = func._schema.name.partition("::")[2]
            self._count(name, args, result if functional else None)
        return result

    def _count(self, name: str, args: Sequence[Any], result: Any) -> None:
        """`result` is that of a functional collective; the others write into an argument."""
        traffic, functional = self.traffic, result is not None
        if "allgather" in name or "all_gather" in name:
            traffic.gathered += _bytes(result if functional else args[0])
        elif "reduce_scatter" in name:
            traffic.reduce_scattered += _bytes(args[0 if functional else 1])
        elif "allreduce" in name or "all_reduce" in name:
            traffic.all_reduced += _bytes(args[0])
            traffic.all_reduces += 1
        elif name not in _NO_DATA:
            traffic.other += _bytes(args[0])


def exposed(communication: Iterable[Interval], work: Iterable[Interval]) -> float:
    """How long communication ran while no work did, in the unit of the intervals.

    Intervals may overlap each other and come in any order.
    """
    edges = []
    for kind, intervals in enumerate((communication, work)):
        for start, end in intervals:
            edges += [(start, kind, 1), (end, kind, -1)]
    running, total, last = [0, 0], 0.0, 0.0
    for time, kind, change in sorted(edges):
        if running[0] and not running[1]:
            total += time - last
        running[kind] += change
        last = time
    return total


def exposed_ms(profiled: torch.profiler.profile) -> float:
    """Time in which a GPU ran kernels of NCCL and nothing else, in milliseconds."""
    spans: dict[bool, list[Interval]] = {True: [], False: []}
    events = profiled.events()  # type: ignore[no-untyped-call]
    for event in events or ():
        lower = event.name.lower()
        kernel = event.device_type == torch.profiler.DeviceType.CUDA
        # What has such a name is a span around kernels, not one of them.
        around = event.is_user_annotation or lower.startswith(("nccl:", "fsdp::"))
        if kernel and not around:
            span = (event.time_range.start, event.time_range.end)
            spans["nccl" in lower].append(span)
    return exposed(communication=spans[True], work=spans[False]) / 1e3


def _bytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, Tensor))
