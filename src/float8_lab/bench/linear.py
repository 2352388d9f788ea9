"""`float8 bench linear`: one linear layer, forward and backward, in bf16 and in float8."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.config import CastConfig
from float8.formats import E4M3, E5M2
from float8.gemm import Gemm, matmul
from float8.quantize import Cast, quantize
from float8_lab.bench.shapes import Shape
from float8_lab.bench.step import Row, Step, compare, with_speedups
from float8_lab.bench.timing import Sampler, input_sets, kernel_sampler, steady_sampler
from float8_lab.bench.variants import EAGER, Variant, make_variants

AT_LEAST = 17.0  # lower bound of the SQNR in dB against bf16
_MOST_SETS = 16


class Layer(nn.Module):
    """Holds a linear layer: the compiler leaves a bare one, or one in a Sequential, alone."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        N, K = weight.shape
        self.linear = nn.Linear(K, N, bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output [M, N] for x [M, K]."""
        return self.linear(x)  # type: ignore[no-any-return]


def layer_data(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight [N, K], input [M, K] and gradient of the output [M, N], random in bf16."""
    M, K, N = shape
    make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    return make(N, K) * K**-0.5, make(M, K), make(M, N)


class LinearTimes(NamedTuple):
    """Milliseconds of forward and backward of a layer: of the GPU alone; on a CPU of the host."""

    bf16_ms: float
    float8_ms: float


def measure_linear(shape: Shape, recipe: str, device: torch.device) -> LinearTimes:
    """Check, then time a layer on random data in eager mode; raises as `compare`."""
    variants = make_variants([recipe], [EAGER])
    bf16, float8 = _rows(shape, variants, device, rounds=10, gpu_time=True)
    return LinearTimes(bf16["ms"], float8["ms"])


def bench_linear(
    shapes: Mapping[str, Sequence[Shape]],
    variants: Sequence[Variant],
    device: torch.device,
    rounds: int,
    *,
    gpu_time: bool = False,
) -> Iterator[list[Row]]:
    """Time every variant of every shape; yields the rows of one shape, then a set's sums.

    The first variant of each mode must be bf16. Times are those of a steady state: in eager mode,
    if issuing takes longer than the GPU, they are the time to issue. With `gpu_time` they are the
    GPU's alone, on data that is not in its cache. The sync of delayed scaling is not in them.
    """
    for name, members in shapes.items():
        summed = []
        for shape in members:
            rows = _rows(shape, variants, device, rounds, gpu_time)
            summed.append([{"set": name, **shape._asdict(), **row} for row in rows])
            yield summed[-1]
        if len(summed) > 1:
            yield _sums(summed)


def _rows(
    shape: Shape, variants: Sequence[Variant], device: torch.device, rounds: int, gpu_time: bool
) -> list[Row]:
    torch.compiler.reset()  # the shape before may have filled the compiler's cache
    weight, *data = layer_data(shape, device)

    def make(variant: Variant) -> Step:
        return Step(variant, Layer(weight), *data)

    def uncached(step: Step, device: torch.device) -> Sampler:
        sets = min(_MOST_SETS, input_sets(2 * shape.M * (shape.K + shape.N), device))
        data = [layer_data(shape, device)[1:] for _ in range(sets)]
        calls = [functools.partial(step.gradients, *each) for each in data]
        return kernel_sampler(calls, device, at_least_ms=1.0)

    more: dict[str, Any] = {"at_least": AT_LEAST}
    more["sample"] = uncached if gpu_time else steady_sampler
    more["beside"] = {"floor_ms": _gemms_sampler(weight, *data)}
    *_, rows = compare(f"linear {shape}", make, variants, device, rounds, **more)
    return rows


def _gemms_sampler(weight: Tensor, x: Tensor, grad: Tensor) -> Sampler:
    """Samples the three float8 GEMMs of a layer alone, which casts could be hidden behind."""
    formats = ((x, E4M3), (weight, E4M3), (grad, E5M2))
    casts: list[Any] = [
        quantize(t, Cast(CastConfig(target_dtype=to)), row=True, col=True) for t, to in formats
    ]
    x8, w8, g8 = casts
    gemms = ((x8.row, w8.row, True), (g8.row, w8.col, False), (g8.col, x8.col, False))

    def run() -> object:
        return [matmul(a, b, gemm=Gemm(fast), out_dtype=x.dtype) for a, b, fast in gemms]

    return kernel_sampler([run], x.device)


def _sums(summed: Sequence[Sequence[Row]]) -> list[Row]:
    sums: list[Row] = []
    for same in zip(*summed, strict=True):  # one variant over all shapes
        total = {**same[0], "M": "sum", "K": None, "N": None, "peak_gib": None}
        if all("ms" in row for row in same):
            total |= {key: sum(row[key] for row in same) for key in ("ms", "floor_ms")}
            total["sqnr_db"] = min(row["sqnr_db"] for row in same)
        sums.append(total)
    return with_speedups(sums)
