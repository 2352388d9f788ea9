"""`float8 bench linear`: one linear layer, forward and backward, in bf16 and in float8."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from float8.formats import E4M3, E5M2
from float8.gemm import Gemm, matmul
from float8.quantize.quantize import quantize
from float8.quantize.spec import CastSpec
from float8_lab.bench.shapes import Shape
from float8_lab.bench.step import Row, Step, compare, saved_bytes
from float8_lab.bench.timing import Sampler, issue_microseconds, kernel_sampler
from float8_lab.bench.variants import EAGER, HIGH_PRECISION, Variant

_AT_LEAST = 17.0  # lower bound of the SQNR in dB against bf16
_SUM = "sum"
# Layers so small that only the time to issue them counts.
_TOKENS, _WIDTH, _CHAIN = 32, 256, 16


class Layer(nn.Module):
    """Holds a linear layer: the compiler leaves a bare `nn.Linear` alone."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        N, K = weight.shape
        self.linear = nn.Linear(K, N, bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output [M, N] for x [M, K]."""
        output: Tensor = self.linear(x)
        return output


def bench_linear(
    shapes: Mapping[str, Sequence[Shape]],
    variants: Sequence[Variant],
    device: torch.device,
    rounds: int,
) -> Iterator[list[Row]]:
    """Time every variant of every shape; yields the rows of one shape, then a set's sums.

    The first variant of each mode must be bf16. Times are those of a steady state: in eager mode,
    if issuing takes longer than the GPU, they are the time to issue. The sync of delayed scaling,
    which happens once per optimizer step for a whole model, is not in them; `float8 bench block`
    has it.
    """
    for name, members in shapes.items():
        summed = []
        for shape in members:
            summed.append(_rows(name, shape, variants, device, rounds))
            yield summed[-1]
        if len(summed) > 1:
            yield _sums(name, summed)


def _rows(
    name: str, shape: Shape, variants: Sequence[Variant], device: torch.device, rounds: int
) -> list[Row]:
    torch.compiler.reset()  # the shape before may have filled the compiler's cache
    M, K, N = shape
    sizes = ((N, K), (M, K), (M, N))
    weight, x, grad = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in sizes)
    weight *= K**-0.5

    def saved(step: Step) -> Row:
        return {"saved_mib": saved_bytes(step.forward, step.model.parameters()) / 2**20}

    steps = (Step(variant, Layer(weight), x, grad) for variant in variants)
    beside = {"floor_ms": _gemms_sampler(x, weight, grad)}
    *_, rows = compare(
        f"linear {shape}", steps, device, rounds, at_least=_AT_LEAST, measure=saved, beside=beside
    )
    return [{"set": name, "M": M, "K": K, "N": N, **row} for row in rows]


def _gemms_sampler(x: Tensor, weight: Tensor, grad: Tensor) -> Sampler:
    """Samples the three float8 GEMMs of a layer alone, which casts could be hidden behind."""
    formats = ((x, E4M3), (weight, E4M3), (grad, E5M2))
    casts: list[Any] = [quantize(t, CastSpec(to), row=True, col=True) for t, to in formats]
    x8, w8, g8 = casts
    gemms = ((x8.row, w8.row, True), (g8.row, w8.col, False), (g8.col, x8.col, False))

    def run() -> object:
        return [matmul(a, b, gemm=Gemm(fast), out_dtype=x.dtype) for a, b, fast in gemms]

    return kernel_sampler([run], x.device)


def _sums(name: str, summed: Sequence[Sequence[Row]]) -> list[Row]:
    sums: list[Row] = []
    for same in zip(*summed, strict=True):  # one variant over all shapes
        total = {**same[0], "set": name, "M": _SUM, "K": None, "N": None, "peak_gib": None}
        total |= {key: sum(row[key] for row in same) for key in ("saved_mib", "ms", "floor_ms")}
        total["sqnr_db"] = min(row["sqnr_db"] for row in same)
        sums.append(total)
    bf16 = {row["mode"]: row["ms"] for row in sums if row["recipe"] == HIGH_PRECISION}
    return [{**row, "speedup": bf16[row["mode"]] / row["ms"]} for row in sums]


def host_microseconds(variants: Sequence[Variant], device: torch.device) -> dict[str, float]:
    """Time of the calling thread to issue one forward and backward in eager mode, by recipe.

    Of a chain of layers, divided by their number: a single one would be charged the start of
    `backward()`, which is the same for a whole model.
    """
    make = {"device": device, "dtype": torch.bfloat16}
    # A CPU computes in the calling thread, for seconds if it has no float8 GEMM of its own.
    calls, samples = (3, 15) if device.type == "cuda" else (1, 3)
    times = {}
    for variant in variants:
        if variant.mode == EAGER:
            linears = [nn.Linear(_WIDTH, _WIDTH, bias=False, **make) for _ in range(_CHAIN)]
            x, grad = (torch.randn(_TOKENS, _WIDTH, **make) for _ in range(2))  # type: ignore[call-overload]
            step = Step(variant, nn.Sequential(*linears), x, grad)
            call = functools.partial(_issue, step, grad)
            issue = issue_microseconds(call, device, calls=calls, samples=samples)
            times[variant.recipe] = issue / _CHAIN
    return times


def _issue(step: Step, grad: Tensor) -> object:
    """Forward and backward, and nothing else of a step."""
    output, x = step.forward()
    return torch.autograd.grad(output, (x, *step.model.parameters()), grad)
