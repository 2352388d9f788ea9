"""`float8 bench matmul`: one GEMM per shape, bf16 and float8."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from float8.config import CastConfig
from float8.formats import E4M3
from float8.gemm import Gemm, matmul
from float8.quantize import Cast, quantize
from float8_lab.bench.shapes import Shape
from float8_lab.bench.step import Row, check
from float8_lab.bench.timing import input_sets, kernel_sampler, take_turns

BF16, NO_FAST, FAST = "bf16", "float8", "float8 fast accum"

# Lower bounds of the SQNR in dB against float64 on the same operands. A result in bf16 has about
# 53; fast accumulation drops bits at every step along K.
_AT_LEAST = {BF16: 45.0, NO_FAST: 35.0, FAST: 20.0}
_CHECKED_ROWS = 256
# Long enough for the clocks to drop to what the GPU's power allows, as they do in training.
_SAMPLE_MS = 60.0


def bench_matmul(shapes: Sequence[Shape], device: torch.device, rounds: int) -> Iterator[list[Row]]:
    """Time `[M, K] @ [K, N]`; yields the rows of one GEMM at a time.

    Both operands lie contiguous along K, in several sets that exceed the L2 cache; results: bf16.
    """
    for shape in shapes:
        yield _rows(shape, device, rounds)


def _rows(shape: Shape, device: torch.device, rounds: int) -> list[Row]:
    M, K, N = shape
    sets: dict[str, list[Any]] = {BF16: [], NO_FAST: []}
    for _ in range(input_sets(2 * (M * K + N * K), device)):
        plain = [torch.randn(R, K, device=device, dtype=torch.bfloat16) for R in (M, N)]
        sets[BF16].append(plain)
        sets[NO_FAST].append(
            [quantize(x, Cast(CastConfig(target_dtype=E4M3)), row=True).row for x in plain]
        )
    sets[FAST] = sets[NO_FAST]
    # Rows spread over the whole product, against float64 on the same operands.
    picked = torch.arange(0, M, max(1, M // _CHECKED_ROWS), device=device)
    rows, samplers = [], {}
    for variant, bound in _AT_LEAST.items():
        high, first = variant == BF16, sets[variant][0]
        a, b = (x.double() if high else x.data.double() * x.scale for x in first)
        results = {variant: _product(variant, *first)[picked]}
        quality = check(f"matmul {shape}", {variant: a[picked] @ b.t()}, results, bound)
        rows.append({**shape._asdict(), "variant": variant, "sqnr_db": quality})
        calls = [functools.partial(_product, variant, *operands) for operands in sets[variant]]
        samplers[variant] = kernel_sampler(calls, device, at_least_ms=_SAMPLE_MS)
    times = take_turns(samplers, rounds)
    for row, ms in zip(rows, times.values(), strict=True):
        row |= {"ms": ms, "tflops": 2 * M * K * N / ms / 1e9, "speedup": times[BF16] / ms}
    return rows


def _product(variant: str, a: Any, b: Any) -> Tensor:
    if variant == BF16:
        return a @ b.t()  # type: ignore[no-any-return]
    return matmul(a, b, gemm=Gemm(variant == FAST), out_dtype=torch.bfloat16)
