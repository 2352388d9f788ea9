"""`float8 bench matmul`: one GEMM per shape, bf16 and float8."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from float8.config import ScalingGranularity
from float8.formats import E4M3, E5M2, SHORT_NAME
from float8.gemm import Gemm, matmul
from float8.quantize.quantize import quantize
from float8.quantize.spec import CastSpec, Part, dequantised
from float8_lab.bench.shapes import OUTPUT, Shape, gemm_shapes
from float8_lab.bench.step import Row, check
from float8_lab.bench.timing import input_sets, kernel_sampler, take_turns

BF16 = "bf16"
NO_FAST, FAST = "float8", "float8 fast accum"

# Lower bounds of the SQNR in dB against float64 on the same operands. A result in bf16 has about
# 53; fast accumulation drops bits at every step along K.
_AT_LEAST = {BF16: 45.0, NO_FAST: 35.0, FAST: 20.0}
_CHECKED_ROWS = 256
# Long enough for the clocks to drop to what the GPU's power allows, as they do in training.
_SAMPLE_MS = 60.0


def bench_matmul(
    shapes: Mapping[str, Sequence[Shape]],
    device: torch.device,
    rounds: int,
    *,
    gradients: bool = False,
) -> Iterator[list[Row]]:
    """Time `[M, K] @ [K, N]`; yields the rows of one GEMM at a time.

    Both operands lie contiguous along K, and the result is bf16. Each shape's operands are several
    sets that together exceed the L2 cache. With `gradients` all three GEMMs of each layer are
    timed; in those of the gradients the first operand is in e5m2.
    """
    for name, members in shapes.items():
        for layer in members:
            for gemm, shape in gemm_shapes(layer).items():
                if gradients or gemm == OUTPUT:
                    rows = _rows(gemm, shape, device, rounds)
                    yield [{"set": name, **row} for row in rows]


def _rows(gemm: str, shape: Shape, device: torch.device, rounds: int) -> list[Row]:
    M, K, N = shape
    specs = CastSpec(E4M3 if gemm == OUTPUT else E5M2), CastSpec(E4M3)
    plain: list[Any] = []
    scaled: list[Any] = []
    for _ in range(input_sets(2 * (M * K + N * K), device)):
        plain.append([torch.randn(R, K, device=device, dtype=torch.bfloat16) for R in (M, N)])
        casts = zip(plain[-1], specs, strict=True)
        scaled.append([quantize(x, spec, row=True).row for x, spec in casts])
    quality, samplers = {}, {}
    for variant, bound in _AT_LEAST.items():
        sets = plain if variant == BF16 else scaled
        # Rows spread over the whole product, against float64 on the same operands.
        picked = torch.arange(0, M, max(1, M // _CHECKED_ROWS), device=device)
        a, b = (
            dequantised(x, ScalingGranularity.TENSORWISE, torch.float64)
            if isinstance(x, Part)
            else x.double()
            for x in sets[0]
        )
        expected, found = a[picked] @ b.t(), _product(variant, *sets[0])[picked]
        what = f"matmul {gemm} {shape}"
        quality[variant] = check(what, {variant: expected}, {variant: found}, bound)
        calls = [functools.partial(_product, variant, *operands) for operands in sets]
        samplers[variant] = kernel_sampler(calls, device, at_least_ms=_SAMPLE_MS)
    times = take_turns(samplers, rounds)
    return [
        {
            "gemm": gemm,
            **shape._asdict(),
            "format_a": None if variant == BF16 else SHORT_NAME[specs[0].dtype],
            "variant": variant,
            "ms": ms,
            "tflops": 2 * M * K * N / ms / 1e9,
            "speedup": times[BF16] / ms,
            "sqnr_db": quality[variant],
        }
        for variant, ms in times.items()
    ]


def _product(variant: str, a: Any, b: Any) -> Tensor:
    if variant == BF16:
        product: Tensor = a @ b.t()
        return product
    return matmul(a, b, gemm=Gemm(variant == FAST), out_dtype=torch.bfloat16)
