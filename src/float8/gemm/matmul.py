"""The one door for GEMMs: two operands in float8, multiplied and scaled."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from float8.config import ScalingGranularity
from float8.formats import lacks_float8_gemm
from float8.quantize.spec import Part

Granularities = tuple[ScalingGranularity, ScalingGranularity]
PER_TENSOR: Granularities = (ScalingGranularity.TENSORWISE, ScalingGranularity.TENSORWISE)


class Gemm(NamedTuple):
    """How a GEMM runs."""

    use_fast_accum: bool = False
    """Add with fewer bits where the device offers it."""

    emulate: bool = False
    """Multiply the dequantised values in float32: any device."""

    granularities: Granularities = PER_TENSOR
    """What the scales of its two operands cover."""


FINER: dict[Granularities, Callable[[Part, Part, Gemm, torch.dtype], Tensor]] = {}
"""What multiplies operands with finer scales than one per tensor."""


def matmul(a: Part, b: Part, *, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    """`(a.data * a.scale) @ (b.data * b.scale).T`, accumulated in float32.

    Both operands lie contiguous along the contraction dim, as Hopper's float8 tensor cores read
    them.

    Args:
        a: [M, K] float8, K % 16 == 0; on GPUs its scale lies at a multiple of 16 bytes.
        b: [N, K] float8, N % 16 == 0; likewise.
        gemm: how; `emulate` takes any K and N.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        [M, N] of dtype `out_dtype`.

    Raises:
        ValueError: a scale has another shape than its granularity says.
        RuntimeError: the device has no float8 GEMM and `emulate` is False.
        NotImplementedError: nothing multiplies these granularities.
    """
    if gemm.granularities != PER_TENSOR:
        if gemm.granularities not in FINER:
            raise NotImplementedError(f"matmul: got {gemm.granularities}, expected {PER_TENSOR}")
        return FINER[gemm.granularities](a, b, gemm, out_dtype)
    if a.scale.numel() != 1 or b.scale.numel() != 1:
        raise ValueError(
            f"matmul: got scales of shapes {tuple(a.scale.shape)} and {tuple(b.scale.shape)}, "
            f"expected one element each, for one scale per tensor"
        )
    if gemm.emulate:
        return _emulated(a, b, out_dtype)
    if a.data.is_cpu:  # torch's CPU kernel calls mm inside, which autocast would round
        with torch.autocast("cpu", enabled=False):
            return torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale, out_dtype=out_dtype)
    reason = None if torch.compiler.is_compiling() else lacks_float8_gemm(a.data.device)
    if reason is not None:
        raise RuntimeError(
            f"float8 GEMM: {reason}; set emulate=True in Float8LinearConfig to compute in high "
            f"precision on the dequantised values"
        )
    # Not the public torch.nn.functional.scaled_mm: it wraps the same kernel in Python checks that
    # cost eager mode more than the launch.
    return torch._scaled_mm(
        a.data,
        b.data.t(),
        a.scale,
        b.scale,
        out_dtype=out_dtype,
        use_fast_accum=gemm.use_fast_accum,
    )


def _emulated(a: Part, b: Part, out_dtype: torch.dtype) -> Tensor:
    # Autocast would round the operands to its own dtype.
    with torch.autocast(a.data.device.type, enabled=False):
        product = a.data.to(torch.float32) @ b.data.to(torch.float32).t()
    # As the tensor cores do: scale the float32 accumulator, then round once.
    product = product * a.scale * b.scale
    # No `.to()` that does nothing: when an autograd.Function returns one, the gradients that
    # torch 2.11's Dynamo traces for it are zero.
    return product if out_dtype == torch.float32 else product.to(out_dtype)
