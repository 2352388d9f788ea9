"""`float8 bench matmul`: one GEMM per shape, bf16 and float8, against the device's ceiling."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.bench.devices import input_sets
from float8.bench.shapes import Shape
from float8.cost import ceilings_of
from float8.formats import E4M3, FLOAT8_MAX
from float8.gemm import scaled_mm
from float8.measure import check, kernel_sampler, take_turns

Row = dict[str, Any]

BF16, NO_FAST, FAST = "bf16", "float8", "float8 fast accum"
VARIANTS = (BF16, NO_FAST, FAST)

# Lower bounds of the SQNR in dB against float64 on the same operands. A result in bf16 has about
# 53; fast accumulation drops bits at every step along K.
_AT_LEAST = {BF16: 45.0, NO_FAST: 35.0, FAST: 20.0}
_CHECKED_ROWS = 256


class Scaled(NamedTuple):
    """A float8 operand."""

    data: Tensor
    scale: Tensor


def bench_matmul(
    shapes: Mapping[str, Sequence[Shape]], device: torch.device, rounds: int
) -> Iterator[list[Row]]:
    """Time `[M, K] @ [K, N]`; yields the rows of one shape at a time.

    Both operands lie contiguous along K, and the result is bf16. Each shape's operands are several
    sets that together exceed the L2 cache.

    Raises:
        WrongResultError: A product is wrong; says which.
    """
    for name, members in shapes.items():
        for shape in members:
            yield _rows(name, shape, device, rounds)


def _rows(name: str, shape: Shape, device: torch.device, rounds: int) -> list[Row]:
    M, K, N = shape
    sets = input_sets(2 * (M * K + N * K), device)
    operands = [_random(shape, device) for _ in range(sets)]
    scaled = [(_to_float8(a), _to_float8(b)) for a, b in operands]
    quality = {variant: _check(variant, shape, operands[0], scaled[0]) for variant in VARIANTS}
    calls = {
        BF16: [functools.partial(_bf16, *pair) for pair in operands],
        NO_FAST: [functools.partial(_float8, *pair, fast=False) for pair in scaled],
        FAST: [functools.partial(_float8, *pair, fast=True) for pair in scaled],
    }
    samplers = {variant: kernel_sampler(calls[variant], device) for variant in VARIANTS}
    times = take_turns(samplers, rounds)
    ceilings = ceilings_of(device)
    rows = []
    for variant, ms in times.items():
        rate = 2 * M * K * N / ms / 1e9
        share = None
        if ceilings is not None:
            peak = ceilings.bf16_tflops if variant == BF16 else ceilings.float8_tflops
            share = rate / peak
        rows.append(
            {
                "set": name,
                "M": M,
                "K": K,
                "N": N,
                "variant": variant,
                "ms": ms,
                "tflops": rate,
                "of_ceiling": share,
                "speedup": times[BF16] / ms,
                "sqnr_db": quality[variant],
            }
        )
    return rows


def _random(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    M, K, N = shape
    a = torch.randn(M, K, device=device, dtype=torch.bfloat16)
    return a, torch.randn(N, K, device=device, dtype=torch.bfloat16)


def _to_float8(x: Tensor) -> Scaled:
    """Data and decode scale, in plain torch: what is timed here is the GEMM alone."""
    scale = x.abs().max().float() / FLOAT8_MAX[E4M3]
    data = (x / scale).clamp(-FLOAT8_MAX[E4M3], FLOAT8_MAX[E4M3]).to(E4M3)
    return Scaled(data, scale)


def _bf16(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


def _float8(a: Scaled, b: Scaled, *, fast: bool) -> Tensor:
    return scaled_mm(
        a.data, a.scale, b.data, b.scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _check(
    variant: str, shape: Shape, operands: tuple[Tensor, Tensor], scaled: tuple[Scaled, Scaled]
) -> float:
    """Compare rows spread over the whole product with float64 on the same operands."""
    if variant == BF16:
        a, b = (operand.double() for operand in operands)
        product = _bf16(*operands)
    else:
        a, b = (operand.data.double() * operand.scale for operand in scaled)
        product = _float8(*scaled, fast=variant == FAST)
    rows = torch.arange(0, shape.M, max(1, shape.M // _CHECKED_ROWS), device=product.device)
    what = f"matmul {shape} {variant}"
    return check(what, a[rows] @ b.t(), product[rows], _AT_LEAST[variant])
