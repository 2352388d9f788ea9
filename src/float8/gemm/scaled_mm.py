"""The scaled float8 GEMM, and its emulation in high precision."""

import torch
from torch import Tensor

from float8.formats import lacks_float8_gemm
from float8.gemm.choice import GemmKernel, kernel_for


def scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
    emulate: bool = False,
    kernel: GemmKernel | None = None,
) -> Tensor:
    """`(a * scale_a) @ (b * scale_b).T`, accumulated in float32.

    Both operands lie contiguous along the contraction dim, as Hopper's float8 tensor cores read
    them.

    Args:
        a: [M, K] float8, row-major, K % 16 == 0.
        scale_a: 0-dim float32 decode scale, at a multiple of 16 bytes on GPUs; for `ROWWISE` also
            [M, 1].
        b: [N, K] float8, row-major, N % 16 == 0.
        scale_b: likewise; for `ROWWISE` also [1, N].
        out_dtype: float32, bfloat16 or float16.
        use_fast_accum: add with fewer bits where the device offers it.
        emulate: multiply the dequantised values in float32; any device, K and N.
        kernel: what runs it; None: the one that was measured to be faster, see
            `float8.gemm.choice`. `ROWWISE` needs M > 1, a bfloat16 result and `b` in e4m3; on
            GPUs torch raises where they are not.

    Returns:
        [M, N] of dtype `out_dtype`.

    Raises:
        RuntimeError: the device has no float8 GEMM and `emulate` is False.
    """
    if emulate:
        return _emulated_mm(a, scale_a, b, scale_b, out_dtype)
    if kernel is None and use_fast_accum:  # without it, no choice
        kernel = kernel_for(a, b, out_dtype)
    if kernel is GemmKernel.ROWWISE:
        scale_a = scale_a.expand(a.shape[0], 1).contiguous()
        scale_b = scale_b.expand(1, b.shape[0]).contiguous()
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
