"""Watching what torch is asked to do: which ops run, on what; what is sent, what is saved."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def is_wrapper(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


class Spy(TorchDispatchMode):
    """Sees what is dispatched; of wrappers, what they make of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented
        self.see(func, args)
        return func(*args, **(kwargs or {}))

    def see(self, func: Any, args: Any) -> None:
        raise NotImplementedError


class OpCounter(Spy):
    """Counts dispatched ops, by their overload packet's name: `ops["aten._scaled_mm"]`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def see(self, func: Any, args: Any) -> None:
        self.ops[str(func.overloadpacket)] += 1

    @property
    def gemms(self) -> int:
        """Float8 GEMMs run."""
        return self.ops["aten._scaled_mm"] + self.ops["float8.scaled_mm"]

    @property
    def high_precision_gemms(self) -> int:
        return sum(self.ops[f"aten.{op}"] for op in ("mm", "addmm", "bmm", "matmul", "linear"))


class GemmSpy(Spy):
    """Keeps the operands of every float8 GEMM: `(a [M, K], scale_a, b [N, K], scale_b)`."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def see(self, func: Any, args: Any) -> None:
        if func is torch.ops.aten._scaled_mm.default:
            a, b_t, scale_a, scale_b = args[:4]
            self.gemms.append((a.clone(), scale_a.clone(), b_t.t().clone(), scale_b.clone()))
        elif func is torch.ops.float8.scaled_mm.default:  # on a CPU
            a, b, scale_a, scale_b = (each.clone() for each in args[:4])
            self.gemms.append((a, scale_a, b, scale_b))


class Traffic(Spy):
    """Collectives of this rank while it is watched; in compiled code none but FSDP2's."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_higher_order_operators = True
        self.sizes: list[int] = []
        """Bytes that this rank gave into each all-gather of FSDP2."""
        self.gather_dtypes: set[torch.dtype] = set()
        self.all_reduces = 0
        self.seen: list[tuple[str, torch.dtype, int]] = []
        """Functional collectives, as DTensors make them: name, dtype and bytes given."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else compiled code would run in eager mode."""
        return True

    def see(self, func: Any, args: Any) -> None:
        name = func.overloadpacket.__name__
        if func.namespace == "fsdp" and name == "all_gather_copy_in":
            self.sizes.append(args[3] * args[1].itemsize)
            self.gather_dtypes.add(args[1].dtype)
        if func.namespace == "_c10d_functional" and "wait" not in name:
            dtype = args[0].dtype
            dtype = torch.uint8 if dtype.itemsize == 1 else dtype  # GPUs send float8 as it is
            self.seen.append((name, dtype, args[0].nbytes))
        self.all_reduces += name in ("allreduce_", "all_reduce")

    def bytes_of(self, name: str) -> dict[torch.dtype, int]:
        """Given into functional ones of this name, by dtype; those of single numbers left out."""
        total: dict[torch.dtype, int] = {}
        for kind, dtype, size in self.seen:
            if kind.startswith(name) and size > 4:
                total[dtype] = total.get(dtype, 0) + size
        return total


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that autograd saves for backward."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved
