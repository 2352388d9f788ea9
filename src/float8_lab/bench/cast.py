"""`float8 bench cast`: the kernels around the GEMMs, against the bandwidth of a device copy."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from float8 import kernels
from float8.config import CastConfig, ScalingGranularity
from float8.formats import E4M3
from float8.kernels.amax import amax_reference
from float8.kernels.cast import cast_reference
from float8.kernels.transpose import transpose_reference
from float8.scales import DelayedScale
from float8_lab.bench.shapes import Shape
from float8_lab.bench.step import Row
from float8_lab.bench.timing import input_sets, kernel_sampler, take_turns
from float8_lab.errors import WrongResultError

Call = Callable[[Tensor], object]


class Case(NamedTuple):
    """One kind of call."""

    name: str
    bytes_per_element: int  # what it has to read and write once
    call: Call
    twin: Call  # the same in plain torch
    prepare: Callable[[Tensor], Tensor] = lambda x: x  # makes the input from a bf16 tensor


def bench_cast(
    tensors: Sequence[tuple[int, int]], device: torch.device, rounds: int
) -> Iterator[list[Row]]:
    """Time amax, casts and transposes of bf16 tensors; yields the rows of one tensor at a time.

    Each result is compared with its plain-torch twin's first, bit by bit. GB/s counts what must be
    read and written once; `of_copy` is that over the bandwidth of a copy of the same tensor.
    """
    for R, C in tensors:
        cases = _cases(device)
        count = max(3, input_sets(2 * R * C, device))
        xs = [torch.randn(R, C, dtype=torch.bfloat16, device=device) for _ in range(count)]
        samplers = {}
        for case in cases:
            for x in (xs[0], _awkward(xs[0]), _awkward(xs[0], torch.inf, -torch.inf, torch.nan)):
                given = case.prepare(x)
                _agree(f"{case.name} of {R} x {C}", case.call(given), case.twin(given))
            calls = [functools.partial(case.call, case.prepare(x)) for x in xs]
            samplers[case.name] = kernel_sampler(calls, device)
        times = take_turns(samplers, rounds)
        rows: list[Row] = []
        for case in cases:
            ms = times[case.name]
            row = {"R": R, "C": C, "case": case.name, "us": ms * 1e3}
            row["gb_per_s"] = case.bytes_per_element * R * C / ms / 1e6
            rows.append({**row, "of_copy": row["gb_per_s"] / (rows or [row])[0]["gb_per_s"]})
        yield rows


def distinct_tensors(shapes: Sequence[Shape]) -> list[tuple[int, int]]:
    """Return what layers of these shapes cast: inputs [M, K], weights [N, K], gradients [M, N]."""
    return sorted({tensor for M, K, N in shapes for tensor in ((M, K), (N, K), (M, N))})


def _cases(device: torch.device) -> list[Case]:
    """The kernels as the library calls them, the copy first."""
    scale, amax = (torch.tensor(value, device=device) for value in (0.01, 0.0))
    spec, state = CastConfig(target_dtype=E4M3), DelayedScale(scale, amax)

    def twin(x: Tensor, row: bool = True, col: bool = True) -> object:
        return [(data, scale) for data in cast_reference(x, scale, None, None, E4M3, row, col)]

    def dynamic_twin(x: Tensor) -> object:
        own, *made = cast_reference(x, None, None, None, E4M3, True, True)
        return [(data, own) for data in made]

    def cast(row: bool, col: bool) -> tuple[Call, Call]:
        """An op and its twin, with the same arguments behind the tensor."""
        op = functools.partial(kernels.cast, how=spec, scale=scale, row=row, col=col)
        return op, functools.partial(twin, row=row, col=col)

    def finer(granularity: ScalingGranularity, row: bool, col: bool) -> tuple[Call, Call]:
        spec = CastConfig(target_dtype=E4M3, scaling_granularity=granularity)
        op = functools.partial(kernels.cast, how=spec, row=row, col=col)
        return op, functools.partial(op, traced=True)

    def delayed(x: Tensor) -> object:
        return amax, kernels.cast(x, spec, state=state, row=True, col=True)

    dynamic = functools.partial(kernels.cast, how=spec, row=True, col=True)
    return [
        Case("copy", 4, torch.clone, torch.clone),  # to memory of its own, as the casts write
        Case("amax", 2, kernels.amax, amax_reference),
        Case("cast row+col", 4, *cast(True, True)),
        Case("cast row", 3, *cast(True, False)),
        Case("cast col", 3, *cast(False, True)),
        Case("cast_dynamic row+col", 6, dynamic, dynamic_twin),
        Case("cast_delayed row+col", 4, delayed, lambda x: (amax_reference(x), twin(x))),
        Case("rowwise row", 3, *finer(ScalingGranularity.AXISWISE, True, False)),
        Case("rowwise col", 5, *finer(ScalingGranularity.AXISWISE, False, True)),
        Case("rowwise row+col", 6, *finer(ScalingGranularity.AXISWISE, True, True)),
        Case("1x128 row+col", 4, *finer(ScalingGranularity.BLOCK_1x128, True, True)),
        Case("128x128 row", 3, *finer(ScalingGranularity.BLOCK_128x128, True, False)),
        Case("128x128 col", 3, *finer(ScalingGranularity.BLOCK_128x128, False, True)),
        Case("transpose", 2, kernels.transpose_bytes, transpose_reference, lambda x: x.to(E4M3)),
    ]


def _awkward(x: Tensor, *more: float) -> Tensor:
    """Return values easily got wrong: many magnitudes, subnormals, zeros of both signs, `more`."""
    x = x * (5 * x).exp()
    tiny = torch.finfo(x.dtype).smallest_normal / 4
    for i, value in enumerate((0.0, -0.0, tiny, -tiny, *more)):
        x.view(-1)[i * 5 :: 173] = value
    return x


def _agree(what: str, got: object, expected: object) -> None:
    """Compare all tensors of two results bit by bit; a NaN that is no float8 may have any bits."""
    bits = [
        [_bits(t) for t in tree_leaves(result) if isinstance(t, Tensor)]
        for result in (got, expected)
    ]
    if len(bits[0]) != len(bits[1]) or not all(map(torch.equal, *bits)):
        raise WrongResultError(f"{what}: not bitwise equal to its twin; nothing was timed")


def _bits(x: Tensor) -> Tensor:
    if x.element_size() > 1:
        x = torch.where(x.isnan(), torch.nan, x)
    return x.reshape(-1).view(torch.uint8)
