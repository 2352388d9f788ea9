"""`float8 bench matmul`: one GEMM per shape, bf16 and float8."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from float8.formats import E4M3, E5M2, FLOAT8_MAX, SHORT_NAME
from float8.gemm import Gemm, matmul
from float8.quantize.spec import Part
from float8_lab.bench.devices import input_sets
from float8_lab.bench.quality import check
from float8_lab.bench.shapes import OUTPUT, Shape, gemm_shapes
from float8_lab.bench.timing import kernel_sampler, take_turns

Row = dict[str, Any]

BF16 = "bf16"
NO_FAST, FAST = "float8", "float8 fast accum"

# Lower bounds of the SQNR in dB against float64 on the same operands. A result in bf16 has about
# 53; fast accumulation drops bits at every step along K.
_AT_LEAST = {BF16: 45.0, NO_FAST: 35.0, FAST: 20.0}
_CHECKED_ROWS = 256
# Long enough for the clocks to drop to what the GPU's power allows, as they do in training.
_SAMPLE_MS = 60.0


Operands = tuple[Tensor, Tensor] | tuple[Part, Part]


def bench_matmul(
    shapes: Mapping[str, Sequence[Shape]],
    device: torch.device,
    rounds: int,
    *,
    gradients: bool = False,
) -> Iterator[list[Row]]:
    """Time `[M, K] @ [K, N]`; yields the rows of one GEMM at a time.

    Both operands lie contiguous along K, and the result is bf16. Each shape's operands are several
    sets that together exceed the L2 cache.

    Args:
        shapes: Layers, by the name of their set.
        device: Where.
        rounds: Samples per variant.
        gradients: Time all three GEMMs of each layer; in those of the gradients the first operand
            is in e5m2.

    Raises:
        WrongResultError: A product is wrong; says which.
    """
    for name, members in shapes.items():
        for layer in members:
            for gemm, shape in gemm_shapes(layer).items():
                if gradients or gemm == OUTPUT:
                    yield _rows(name, gemm, shape, device, rounds)


def _rows(name: str, gemm: str, shape: Shape, device: torch.device, rounds: int) -> list[Row]:
    M, K, N = shape
    format_a = E4M3 if gemm == OUTPUT else E5M2
    operands = [_random(shape, device) for _ in range(input_sets(2 * (M * K + N * K), device))]
    scaled = [(_to_float8(a, format_a), _to_float8(b, E4M3)) for a, b in operands]
    sets: dict[str, Sequence[Operands]] = {BF16: operands, NO_FAST: scaled, FAST: scaled}
    what = f"matmul {gemm} {shape}"
    quality = {variant: _check(what, variant, pairs[0]) for variant, pairs in sets.items()}
    samplers = {
        variant: kernel_sampler(
            [functools.partial(_product, variant, *p) for p in pairs],
            device,
            at_least_ms=_SAMPLE_MS,
        )
        for variant, pairs in sets.items()
    }
    times = take_turns(samplers, rounds)
    rows = []
    for variant, ms in times.items():
        rate = 2 * M * K * N / ms / 1e9
        rows.append(
            {
                "set": name,
                "gemm": gemm,
                "M": M,
                "K": K,
                "N": N,
                "format_a": None if variant == BF16 else SHORT_NAME[format_a],
                "variant": variant,
                "ms": ms,
                "tflops": rate,
                "speedup": times[BF16] / ms,
                "sqnr_db": quality[variant],
            }
        )
    return rows


def _random(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    M, K, N = shape
    a = torch.randn(M, K, device=device, dtype=torch.bfloat16)
    return a, torch.randn(N, K, device=device, dtype=torch.bfloat16)


def _to_float8(x: Tensor, dtype: torch.dtype) -> Part:
    """Data and decode scale, in plain torch: what is timed here is the GEMM alone."""
    scale = x.abs().max().float() / FLOAT8_MAX[dtype]
    data = (x / scale).clamp(-FLOAT8_MAX[dtype], FLOAT8_MAX[dtype]).to(dtype)
    return Part(data, scale)


def _product(variant: str, a: Any, b: Any) -> Tensor:
    if variant == BF16:
        product: Tensor = a @ b.t()
        return product
    return matmul(a, b, gemm=Gemm(variant == FAST), out_dtype=torch.bfloat16)


def _check(what: str, variant: str, operands: Operands) -> float:
    """Compare rows spread over the whole product with float64 on the same operands."""
    product = _product(variant, *operands)
    a, b = (_values(operand) for operand in operands)
    step = max(1, a.shape[0] // _CHECKED_ROWS)
    rows = torch.arange(0, a.shape[0], step, device=product.device)
    return check(f"{what} {variant}", a[rows] @ b.t(), product[rows], _AT_LEAST[variant])


def _values(operand: Tensor | Part) -> Tensor:
    if isinstance(operand, Part):
        return operand.data.double() * operand.scale
    return operand.double()
