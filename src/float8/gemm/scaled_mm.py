"""The scaled float8 GEMM, and its emulation in high precision."""

import torch
from torch import Tensor

from float8.formats import lacks_float8_gemm


def scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
    emulate: bool = False,
) -> Tensor:
    """`(a * scale_a) @ (b * scale_b).T`, accumulated in float32.

    Both operands lie contiguous along the contraction dim, as Hopper's float8 tensor cores read
    them.

    Args:
        a: [M, K] float8, row-major, K % 16 == 0.
        scale_a: 0-dim float32 decode scale, at a multiple of 16 bytes on GPUs.
        b: [N, K] float8, row-major, N % 16 == 0.
        scale_b: likewise.
        out_dtype: float32, bfloat16 or float16.
        use_fast_accum: add with fewer bits where the device offers it.
        emulate: multiply the dequantised values in float32; any device, K and N.

    Returns:
        [M, N] of dtype `out_dtype`.

    Raises:
        RuntimeError: the device has no float8 GEMM and `emulate` is False.
    """
    if emulate:
        return _emulated_mm(a, scale_a, b, scale_b, out_dtype)
    if a.is_cpu:  # torch's CPU kernel calls mm inside, which autocast would round
        with torch.autocast("cpu", enabled=False):
            return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out_dtype)
    if not torch.compiler.is_compiling() and (reason := lacks_float8_gemm(a.device)) is not None:
        raise RuntimeError(
            f"float8 GEMM: {reason}; set emulate=True in Float8LinearConfig to compute in high "
            f"precision on the dequantised values"
        )
    # Not the public torch.nn.functional.scaled_mm: it wraps the same kernel in Python checks that
    # cost eager mode more than the launch.
    return torch._scaled_mm(
        a, b.t(), scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum
    )


def _emulated_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    # Autocast would round the operands to its own dtype.
    with torch.autocast(a.device.type, enabled=False):
        product = a.to(torch.float32) @ b.to(torch.float32).t()
    # As the tensor cores do: scale the float32 accumulator, then round once.
    product = product * scale_a * scale_b
    # No `.to()` that does nothing: when an autograd.Function returns one, the gradients that
    # torch 2.11's Dynamo traces for it are zero.
    return product if out_dtype == torch.float32 else product.to(out_dtype)
