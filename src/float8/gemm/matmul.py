"""The one door for GEMMs: two operands in float8, multiplied and scaled."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType as Recipe

from float8.config import ScalingGranularity
from float8.formats import lacks_float8_gemm
from float8.quantize.spec import Part, check_scale, dequantised

TENSORWISE, AXISWISE = ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE
_RECIPES = {
    ScalingGranularity.BLOCK_1x128: Recipe.BlockWise1x128,
    ScalingGranularity.BLOCK_128x128: Recipe.BlockWise128x128,
}

GEMM_OPS = (torch.ops.aten._scaled_mm.default, torch.ops.aten._scaled_mm_v2.default)
"""Ops that `matmul` calls, unless it emulates."""


class Gemm(NamedTuple):
    """How a GEMM runs."""

    use_fast_accum: bool = False
    """Add with fewer bits where the device offers it: not under block scales."""

    emulate: bool = False
    """Multiply the dequantised values in float32: any device."""

    granularities: tuple[ScalingGranularity, ScalingGranularity] = (TENSORWISE, TENSORWISE)
    """What the scales of its two operands cover."""


def matmul(a: Part, b: Part, *, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    """`(a.data * a.scale) @ (b.data * b.scale).T`, accumulated in float32.

    Both operands lie contiguous along the contraction dim, as Hopper's float8 tensor cores read
    them. CPUs multiply finer scales than one per tensor as `emulate` does.

    Args:
        a: [M, K] float8, K % 16 == 0; on GPUs its scale lies at a multiple of 16 bytes.
        b: [N, K] float8, N % 16 == 0; likewise.
        gemm: how; `emulate` takes any K and N.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        [M, N] of dtype `out_dtype`.

    Raises:
        ValueError: a scale has another shape than its granularity says.
        RuntimeError: the device has no such float8 GEMM and `emulate` is False.
    """
    by_blocks = gemm.granularities[0] in _RECIPES
    one_scale_each = gemm.granularities == (TENSORWISE, TENSORWISE)
    if not one_scale_each or a.scale.numel() != 1 or b.scale.numel() != 1:
        for part, granularity in zip((a, b), gemm.granularities, strict=True):
            check_scale(part, granularity)
    if gemm.emulate or (a.data.is_cpu and not one_scale_each):
        return _emulated(a, b, gemm, out_dtype)
    if a.data.is_cpu:  # torch's CPU kernel calls mm inside, which autocast would round
        with torch.autocast("cpu", enabled=False):
            return torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale, out_dtype=out_dtype)
    compiling = torch.compiler.is_compiling()
    reason = None if compiling else lacks_float8_gemm(a.data.device, by_blocks)
    if reason is not None:
        raise RuntimeError(
            f"float8 GEMM: {reason}; set emulate=True in Float8LinearConfig to compute in high "
            f"precision on the dequantised values"
        )
    # Not the public torch.nn.functional.scaled_mm: it wraps the same kernels in Python checks that
    # cost eager mode more than the launch, and torch 2.11's Dynamo cannot trace it.
    if by_blocks:
        recipe_a, recipe_b = (_RECIPES[granularity] for granularity in gemm.granularities)
        scale_a = a.scale.t() if recipe_a is Recipe.BlockWise128x128 else a.scale
        scale_b = b.scale.t() if recipe_b is Recipe.BlockWise128x128 else b.scale
        return torch.ops.aten._scaled_mm_v2.default(  # type: ignore[no-any-return]
            a.data, b.data.t(), [scale_a], [recipe_a.value], [], [scale_b], [recipe_b.value], [],
            None, out_dtype, [], False,
        )  # fmt: skip
    scale_a, scale_b = a.scale, b.scale
    if not one_scale_each:
        scale_a, scale_b = by_rows(a), by_rows(b).t()
    return torch._scaled_mm(
        a.data,
        b.data.t(),
        scale_a,
        scale_b,
        out_dtype=out_dtype,
        use_fast_accum=gemm.use_fast_accum,
    )


def by_rows(part: Part) -> Tensor:
    """One scale for each row of the data, [R, 1], of one scale or as many."""
    rows = part.data.shape[0]
    return part.scale.reshape(-1, 1).expand(rows, 1).contiguous()


def _emulated(a: Part, b: Part, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    by_blocks = gemm.granularities[0] in _RECIPES
    wide = (
        dequantised(part, granularity) if by_blocks else part.data.to(torch.float32)
        for part, granularity in zip((a, b), gemm.granularities, strict=True)
    )
    # Autocast would round the operands to its own dtype.
    with torch.autocast(a.data.device.type, enabled=False):
        left, right = wide
        product = left @ right.t()
    if not by_blocks:
        # As the tensor cores do: scale the float32 accumulator, then round once.
        one_scale = gemm.granularities[1] is TENSORWISE
        product = product * a.scale * (b.scale if one_scale else b.scale.t())
    # No `.to()` that does nothing: when an autograd.Function returns one, the gradients that
    # torch 2.11's Dynamo traces for it are zero.
    return product if out_dtype == torch.float32 else product.to(out_dtype)
