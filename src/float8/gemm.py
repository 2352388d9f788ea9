"""`matmul` multiplies two float8 operands, on CPU or GPU, with scales per tensor, row or block."""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from float8.config import Granularity, ScalingGranularity
from float8.formats import lacks_float8_gemm
from float8.kernels.dequantize import dequantised_by_kernel
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.private import surely
from float8.kernels.swizzle import RECIPE, SWIZZLE, scales_of_rows, swizzled
from float8.scales import Operand, dequantised

_TENSORWISE = ScalingGranularity.TENSORWISE
_1x128, _128x128 = [F.ScalingType.BlockWise1x128.value], [F.ScalingType.BlockWise128x128.value]
"""The values of `torch.nn.functional.ScalingType` for the blocks of 128 that Hopper multiplies."""

# Count the FLOPs of the GEMM under block scales, unless a later torch does.
with contextlib.suppress(RuntimeError):
    register_flop_formula(torch.ops.aten._scaled_mm_v2)(
        lambda a, b, *_, **__: 2 * a[0] * a[1] * b[1]
    )


class Gemm(NamedTuple):
    """Settings of a GEMM: fast accumulation, emulation in high precision, granularity of scales."""

    use_fast_accum: bool = False  # accumulate with fewer bits where devices can; not for blocks
    emulate: bool = False  # multiply dequantized values in high precision, on any device
    powers_of_2: bool = False  # all scales are, so that bfloat16 holds dequantized values exactly
    granularities: tuple[Granularity, Granularity] = (_TENSORWISE, _TENSORWISE)  # of `a` and `b`

    def packed(self) -> str:
        """Return the fields as text for ops, granularities first: "axiswise axiswise False ..."."""
        fast, emulate, powers_of_2, (a, b) = self
        return f"{a.value} {b.value} {fast} {emulate} {powers_of_2}"

    @staticmethod
    @functools.cache
    def unpacked(settings: str) -> "Gemm":
        """Return the `Gemm` from which its method `packed` made the string `settings`."""
        a, b, *switches = settings.split()
        fast, emulate, powers_of_2 = (switch == "True" for switch in switches)
        return Gemm(fast, emulate, powers_of_2, (ScalingGranularity(a), ScalingGranularity(b)))


def matmul(
    a: Operand, b: Operand, shape: tuple[int, int], *, gemm: Gemm, out_dtype: torch.dtype
) -> Tensor:
    """Return `(a.data * a.scale) @ (b.data * b.scale).T`, new and contiguous, of `shape` (M, N).

    GPUs multiply float8 or, if `gemm.emulate` is True, dequantized values: in bfloat16 if
    `gemm.powers_of_2`, else in float32. CPUs multiply in float32. Sums are in float32, but with
    `gemm.use_fast_accum` GPUs may add float8 products in fewer bits. `a.data` [M, K] and `b.data`
    [N, K] are float8, contiguous along K, not empty in eager mode, and may have more rows, for
    padding. Scales are one per tensor, row or block, as `gemm.granularities` says (not checked). On
    GPUs, unless `gemm.emulate`, K and N are multiples of 16, 1x128 scales are column-major, and
    scales per tensor are aligned to 16 bytes.

    Raises:
        RuntimeError: in eager mode, if the device lacks the GEMM, and `gemm.emulate` is False.
    """
    granularity_a, granularity_b = gemm.granularities
    one_scale_each = granularity_a.one_scale and granularity_b.one_scale
    (M, N), compiling = shape, torch.compiler.is_compiling()
    # Remove padding rows before the GEMM, but not under blocks, whose scales are padded, too.
    if not granularity_a.by_blocks and a.data.shape[0] != M:
        a = Operand(a.data[:M], a.scale if granularity_a.one_scale else a.scale[:M])
    # An op tests if `a` is empty, and keeps the copy of `without_padding` that Inductor would drop.
    if compiling and not (surely(a.data.numel() != 0) and surely(a.data.shape[0] == M)):
        return torch.ops.float8.matmul.default(  # type: ignore[no-any-return]
            *a, *b, M, N, gemm.packed(), out_dtype
        )
    if gemm.emulate or (a.data.is_cpu and not one_scale_each):
        y = _emulated(a, b, gemm, out_dtype)
    elif a.data.is_cpu:
        y = torch.ops.float8.scaled_mm.default(a.data, b.data, a.scale, b.scale, out_dtype)
    else:
        # Not in compiled code: Dynamo would warn of the `functools.cache` of `lacks_float8_gemm`.
        reason = None if compiling else lacks_float8_gemm(a.data.device, only=granularity_a.only_on)
        if reason is not None:
            raise refused_gemm(reason)
        # Not the public torch.nn.functional.scaled_mm: it wraps the same kernels in Python checks
        # that cost eager mode more than the launch, and torch 2.11's Dynamo cannot trace it.
        if granularity_a.by_blocks:
            scale_a, *layout_a = _block_scales(a, granularity_a)
            scale_b, *layout_b = _block_scales(b, granularity_b)
            y = torch.ops.aten._scaled_mm_v2.default(
                a.data, b.data.t(), [scale_a], *layout_a, [scale_b], *layout_b, None, out_dtype, [],
                False,  # None: no bias; []: default contraction dims; False: no fast accumulation
            )  # fmt: skip
        else:
            scale_a, scale_b, fast = a.scale, b.scale, gemm.use_fast_accum
            if not one_scale_each:  # torch takes a scale per tensor of both, or per row of both
                scale_a, scale_b = _scale_per_row(a), _scale_per_row(b).t()
            y = torch._scaled_mm(
                a.data, b.data.t(), scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast
            )
    return y if y.shape == (M, N) else without_padding(y, M, N)


def without_padding(y: Tensor, M: int, N: int) -> Tensor:
    """Return a contiguous copy of `y[..., :M, :N]`; a view would keep the padding in memory."""
    # Besides, autograd forbids in-place writes to views that custom functions return.
    return y[..., :M, :N].clone(memory_format=torch.contiguous_format)


def refused_gemm(reason: str) -> RuntimeError:
    """Return the error to raise if a device cannot run a float8 GEMM, for the given `reason`."""
    return RuntimeError(
        f"float8 GEMM: {reason}; set emulate=True in Float8LinearConfig to compute in high "
        f"precision on the dequantised values"
    )


def matmul_of_any_size(
    a: Tensor,  # [M, K] float8, or more rows, for padding
    a_scale: Tensor,  # one, or one per row or block, as `gemm` says
    b: Tensor,  # [N, K] float8, or more rows
    b_scale: Tensor,
    M: int,
    N: int,
    gemm: str,  # settings as `Gemm.packed` returns them
    out_dtype: torch.dtype,
) -> Tensor:
    """Return `(a * a_scale) @ (b * b_scale).T` [M, N], or zeros if `a` is empty; a custom op."""
    if a.numel() == 0:
        return a.new_zeros((M, N), dtype=out_dtype)
    operands = Operand(a, a_scale), Operand(b, b_scale)
    return matmul(*operands, (M, N), gemm=Gemm.unpacked(gemm), out_dtype=out_dtype)


register(
    "matmul",
    matmul_of_any_size,
    fake=lambda a, *rest: a.new_empty(rest[3:5], dtype=rest[-1]),  # [M, N]
    flops=lambda a, *rest, **_: 2 * rest[3] * rest[4] * a[1],  # `a` is its shape, [M, K]
)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Return `(a @ b.T) * scale_a * scale_b` by a float32 GEMM, of float8 `a` and `b`."""
    # On some CPUs with AMX `torch._scaled_mm` takes 300 times as long.
    with torch.autocast(a.device.type, enabled=False):
        product = a.to(torch.float32) @ b.to(torch.float32).t()
    return (product * scale_a * scale_b).to(out_dtype)


register(
    "scaled_mm",
    scaled_mm,
    fake=lambda a, b, *rest: a.new_empty((a.shape[0], b.shape[0]), dtype=rest[-1]),
    flops=lambda a, b, *_, **__: 2 * a[0] * a[1] * b[0],
)

GEMM_OPS: set[Any] = {
    torch.ops.float8.scaled_mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_mm_v2.default,
    torch.ops.float8.matmul.default,
}
"""Ops of float8 GEMMs of linear layers; `save_gemm_outputs` saves their outputs."""


def _scale_per_row(operand: Operand) -> Tensor:
    return operand.scale.reshape(-1, 1).expand(operand.data.shape[0], 1).contiguous()


def _block_scales(operand: Operand, granularity: Granularity) -> tuple[Any, ...]:
    """Return arguments for `aten._scaled_mm_v2`: block scales, [scaling type], [swizzle type]."""
    if granularity.exponents:
        return swizzled(scales_of_rows(operand, granularity)).flatten(), RECIPE, SWIZZLE
    return (operand.scale.t(), _128x128, []) if granularity.square else (operand.scale, _1x128, [])


def _emulated(a: Operand, b: Operand, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    """Return `(a.data * a.scale) @ (b.data * b.scale).T`, multiplied in float32 or bfloat16."""
    granularity_a, granularity_b = gemm.granularities
    dtype = exact_dtype(a.data.device) if gemm.powers_of_2 else torch.float32
    # Scales of blocks vary along the contraction dim, so they must multiply the operands. So do
    # powers of two in bfloat16, since that is exact and a product in bfloat16 is fast.
    scale_operands = granularity_a.by_blocks or dtype == torch.bfloat16
    if scale_operands:
        dequantize = dequantised if a.data.is_cpu else dequantised_by_kernel
        left, right = dequantize(a, granularity_a, dtype), dequantize(b, granularity_b, dtype)
    else:
        left, right = a.data.to(dtype), b.data.to(dtype)
    with torch.autocast(a.data.device.type, enabled=False):  # it would round the operands
        if dtype != torch.bfloat16 or out_dtype == dtype:
            product = left @ right.t()
        else:  # `@` would round to bfloat16 first
            product = torch.mm(left, right.t(), out_dtype=torch.float32)
    if not scale_operands:  # scale the float32 product, then round once, as tensor cores do
        product = product * a.scale * (b.scale if granularity_b.one_scale else b.scale.t())
    # Where `.to()` does nothing, torch 2.11's Dynamo traces gradients of zero for its result.
    return product if out_dtype == product.dtype else product.to(out_dtype)


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the fastest GEMM dtype that holds bfloat16 exactly: bfloat16 on CUDA, else float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
