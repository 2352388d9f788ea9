"""Which of two kernels runs a float8 GEMM with per-tensor scales.

With fast accumulation torch has two, equally accurate: that of cuBLASLt, which takes the two
scales as they are, and the CUTLASS one for a scale per row, which is faster for many shapes, but
wants the scales repeated in vectors. Without fast accumulation the rowwise one gained 2 % at most
and lost up to 21 %: there is no choice.
"""

from __future__ import annotations

import enum
import functools
import math

import torch
from torch import Tensor

from float8.cost import ceilings_of
from float8.formats import E4M3, GEMM_ALIGNMENT, SHORT_NAME
from float8.gemm.table import KernelTable, MeasuredGemm, kernel_table

VECTORS_US = 2.0
"""GPU time to fill the two scale vectors of the rowwise kernel, in microseconds."""

MARGIN = 0.01
"""What else the rowwise kernel must gain, of the GEMM's time: less may be noise of measuring."""

_MOST_CACHED = 4096  # Tokens may differ from step to step.


class GemmKernel(enum.Enum):
    """What runs a GEMM with per-tensor scales."""

    TENSORWISE = "tensorwise"
    """The kernel for one scale per operand."""

    ROWWISE = "rowwise"
    """The kernel for a scale per row, given one scale many times: for fast accumulation, M > 1, a
    bf16 result and a second operand in e4m3."""


def choose_kernel(
    table: KernelTable | None,
    M: int,
    K: int,
    N: int,
    *,
    dtype_a: torch.dtype = E4M3,
    dtype_b: torch.dtype = E4M3,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = True,
) -> GemmKernel:
    """The faster kernel of `[M, K] @ [K, N]`, judged by the nearest measured shape.

    Near is what differs by small factors: distances are those of the logarithms of M, K and N. The
    gain of the nearest shape is scaled with the number of operations, and must exceed `VECTORS_US`
    and `MARGIN`.

    Args:
        table: What was measured on the device; None: nothing, and the choice is `TENSORWISE`.
        M: Rows of the first operand.
        K: Contraction dim.
        N: Columns of the result.
        dtype_a: Format of the first operand.
        dtype_b: Format of the second.
        out_dtype: Dtype of the result.
        use_fast_accum: Whether to add with fewer bits.
    """
    aligned = K % GEMM_ALIGNMENT == 0 and N % GEMM_ALIGNMENT == 0
    # A vector of one scale would be taken for the scale of a tensor.
    possible = M > 1 and min(K, N) > 0 and aligned and dtype_b == E4M3
    if not (table and possible and use_fast_accum and out_dtype == torch.bfloat16):
        return GemmKernel.TENSORWISE

    def distance(measured: MeasuredGemm) -> tuple[float, bool]:
        ratios = (M / measured.M, K / measured.K, N / measured.N)
        squares = sum(math.log2(ratio) ** 2 for ratio in ratios)
        return squares, measured.format_a != SHORT_NAME[dtype_a]

    nearest = min(table, key=distance)
    size = (M * K * N) / (nearest.M * nearest.K * nearest.N)
    gain_us = size * (nearest.tensorwise_us - nearest.rowwise_us)
    worth = gain_us > VECTORS_US + MARGIN * size * nearest.tensorwise_us
    return GemmKernel.ROWWISE if worth else GemmKernel.TENSORWISE


def kernel_for(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> GemmKernel:
    """The kernel for `a` [M, K] and `b` [N, K] on their device, with fast accumulation.

    `TENSORWISE` where a compiler does not know a dim as a number: asking for it would compile the
    model anew for each.
    """
    if out_dtype != torch.bfloat16:
        return GemmKernel.TENSORWISE
    M, K = a.shape
    N = b.shape[0]
    if torch.compiler.is_compiling():
        # Dynamo says of every dim that it is an int. Whoever compiles has loaded this module.
        static = torch.fx.experimental.symbolic_shapes.has_static_value
        if not (static(M) and static(K) and static(N)):
            return GemmKernel.TENSORWISE
        rowwise = _is_rowwise_constant(a.device, int(M), int(K), int(N), a.dtype, b.dtype)
        return GemmKernel.ROWWISE if rowwise else GemmKernel.TENSORWISE
    if not (type(M) is type(K) is type(N) is int):
        return GemmKernel.TENSORWISE
    return _measured_choice(a.device, M, K, N, a.dtype, b.dtype)


@functools.lru_cache(maxsize=_MOST_CACHED)
def _measured_choice(
    device: torch.device, M: int, K: int, N: int, dtype_a: torch.dtype, dtype_b: torch.dtype
) -> GemmKernel:
    return choose_kernel(table_of(device), M, K, N, dtype_a=dtype_a, dtype_b=dtype_b)


def table_of(device: torch.device) -> KernelTable | None:
    """What was measured on a device of this kind; None: nothing, as of any CPU."""
    # A compiler may trace for a GPU where there is none.
    here = device.type == "cuda" and torch.cuda.is_available()
    return kernel_table(ceilings_of(device)) if here else None


def _is_rowwise_constant(
    device: torch.device, M: int, K: int, N: int, dtype_a: torch.dtype, dtype_b: torch.dtype
) -> bool:
    return _measured_choice(device, M, K, N, dtype_a, dtype_b) is GemmKernel.ROWWISE


# Dynamo calls it and keeps the result, instead of tracing into caches and files. This is all that
# torch.compiler.assume_constant_result does, but that one loads the compiler: seconds at import.
_is_rowwise_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
