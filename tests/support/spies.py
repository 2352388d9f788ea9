"""Watching what torch is asked to do: which ops run, with which operands, what is saved."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def is_wrapper(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


class OpCounter(TorchDispatchMode):
    """Counts dispatched ops, by their overload packet's name: `ops["aten._scaled_mm"]`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # count what the wrapper makes of it
        self.ops[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def gemms(self) -> int:
        """Float8 GEMMs run."""
        return self.ops["aten._scaled_mm"]

    @property
    def high_precision_gemms(self) -> int:
        return sum(self.ops[f"aten.{op}"] for op in ("mm", "addmm", "bmm", "matmul", "linear"))


class GemmSpy(TorchDispatchMode):
    """Keeps the operands of every float8 GEMM: `(a [M, K], scale_a, b [N, K], scale_b)`."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented
        if func is torch.ops.aten._scaled_mm.default:
            a, b_t, scale_a, scale_b = args[:4]
            self.gemms.append((a.clone(), scale_a.clone(), b_t.t().clone(), scale_b.clone()))
        return func(*args, **(kwargs or {}))


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that autograd saves for backward."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved
