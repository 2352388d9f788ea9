"""`float8 bench cast`: the kernels around the GEMMs, against the bandwidth of a device copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from float8 import kernels
from float8.formats import E4M3
from float8.quantize.history import DelayedScale
from float8.quantize.spec import CastSpec
from float8_lab.bench.cast_check import check_case, check_tensor
from float8_lab.bench.devices import input_sets
from float8_lab.bench.shapes import Shape
from float8_lab.bench.timing import issue_microseconds, kernel_sampler, take_turns

Row = dict[str, Any]
Item = TypeVar("Item")
_COPY = "copy"


class Case(NamedTuple):
    """One kind of call over several input sets."""

    name: str
    bytes_per_call: int
    calls: list[Callable[[], object]]


def bench_cast(
    shapes: Mapping[str, Sequence[Shape]], device: torch.device, rounds: int
) -> Iterator[list[Row]]:
    """Time amax, casts and transposes of bf16 tensors; yields the rows of one tensor at a time.

    GB/s counts what a call has to read and write once; `of_copy` is that over the bandwidth of a
    copy of the same tensor.

    Raises:
        WrongResultError: A result differs in a bit from its plain-torch twin's; says which.
    """
    for R, C in distinct_tensors(shapes):
        yield _rows(R, C, device, rounds)


def distinct_tensors(shapes: Mapping[str, Sequence[Shape]]) -> list[tuple[int, int]]:
    """What layers of these shapes cast: inputs [M, K], weights [N, K], gradients [M, N]."""
    members = [shape for shapes_of_set in shapes.values() for shape in shapes_of_set]
    tensors = [((M, K), (N, K), (M, N)) for M, K, N in members]
    return sorted({tensor for three in tensors for tensor in three})


def check_awkward(device: torch.device) -> int:
    """Compare kernels and twins bitwise on values and strides that are easily got wrong.

    Returns:
        How many comparisons were made.

    Raises:
        WrongResultError: One differs; says which.
    """
    sizes = ((1, 1), (17, 33), (130, 7), (1000, 1048))
    return sum(check_case(size, device) for size in sizes)


def _rows(R: int, C: int, device: torch.device, rounds: int) -> list[Row]:
    count = max(3, input_sets(2 * R * C, device))
    xs = [torch.randn(R, C, dtype=torch.bfloat16, device=device) for _ in range(count)]
    check_tensor(xs[0])
    cases = _cases(xs)
    samplers = {case.name: kernel_sampler(case.calls, device) for case in cases}
    times = take_turns(samplers, rounds)
    copy = cases[0].bytes_per_call / times[_COPY]
    rows = []
    for case in cases:
        rate = case.bytes_per_call / times[case.name]  # bytes per ms
        rows.append(
            {
                "R": R,
                "C": C,
                "case": case.name,
                "us": times[case.name] * 1e3,
                "gb_per_s": rate / 1e6,
                "of_copy": rate / copy,
            }
        )
    return rows


def _cases(xs: list[Tensor]) -> list[Case]:
    """The kernels as the library calls them, the copy first."""
    n = xs[0].numel()
    scale, amax = (torch.tensor(value, device=xs[0].device) for value in (0.01, 0.0))
    targets = [torch.empty_like(x) for x in xs[:2]]
    data = [_cast(x, scale, row=True, col=False)[0] for x in xs]
    turned = [x.t() for x in xs]

    def both(x: Tensor) -> object:
        return kernels.amax(x), _cast(x, scale, row=True, col=True)

    def delayed(x: Tensor) -> object:
        return kernels.cast_delayed(
            x, CastSpec(E4M3), DelayedScale(scale, amax), row=True, col=True
        )

    def layouts(row: bool, col: bool) -> Callable[[Tensor], object]:
        return lambda x: _cast(x, scale, row=row, col=col)

    def copy(i: int) -> object:
        return targets[i % 2].copy_(xs[i])

    return [
        Case(_COPY, 4 * n, _each(copy, range(len(xs)))),
        Case("amax", 2 * n, _each(kernels.amax, xs)),
        Case("amax of x.t()", 2 * n, _each(kernels.amax, turned)),
        Case("cast row+col", 4 * n, _each(layouts(True, True), xs)),
        Case("cast row+col of x.t()", 4 * n, _each(layouts(True, True), turned)),
        Case("cast row", 3 * n, _each(layouts(True, False), xs)),
        Case("cast col", 3 * n, _each(layouts(False, True), xs)),
        Case("amax, cast row+col", 6 * n, _each(both, xs)),
        Case("cast_dynamic row+col", 6 * n, _each(_dynamic, xs)),
        Case("cast_delayed row+col", 4 * n, _each(delayed, xs)),
        Case("transpose", 2 * n, _each(kernels.transpose_bytes, data)),
        Case("x.abs().max() in torch", 2 * n, _each(lambda x: x.abs().max(), xs)),
    ]


def _cast(x: Tensor, scale: Tensor, *, row: bool, col: bool) -> Any:
    return kernels.cast(x, scale, E4M3, row=row, col=col)


def _dynamic(x: Tensor) -> object:
    return kernels.cast_dynamic(x, CastSpec(E4M3), row=True, col=True)


def _each(function: Callable[[Item], object], items: Sequence[Item]) -> list[Callable[[], object]]:
    def bind(item: Item) -> Callable[[], object]:
        return lambda: function(item)

    return [bind(item) for item in items]


def host_microseconds(device: torch.device) -> dict[str, float]:
    """Time of the calling thread per eager call, on a tensor too small to matter."""
    x = torch.randn(16, 16, dtype=torch.bfloat16, device=device)
    scale = torch.ones((), device=device)
    data = torch.zeros(16, 16, dtype=torch.uint8, device=device)
    calls: dict[str, Callable[[], object]] = {
        "x.abs() in torch": x.abs,
        "amax": lambda: kernels.amax(x),
        "cast row+col": lambda: _cast(x, scale, row=True, col=True),
        "cast_dynamic row+col": lambda: _dynamic(x),
        "transpose": lambda: kernels.transpose_bytes(data),
    }
    return {name: issue_microseconds(call, device) for name, call in calls.items()}
