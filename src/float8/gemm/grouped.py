"""The door for grouped GEMMs: one product for each group of rows, as the tokens of experts are."""

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.formats import lacks_float8_gemm
from float8.gemm.matmul import Gemm
from float8.kernels.grouped_matmul import GROUPED_GEMM
from float8.kernels.groups import ends_of_groups
from float8.kernels.runtime.ops import register
from float8.quantize.spec import Operand


def grouped_matmul(
    a: Operand,
    b: Operand,
    ends: Tensor,
    *,
    gemm: Gemm,
    out_dtype: torch.dtype,
    tokens: int | None = None,
) -> Tensor:
    """Multiply each group by a matrix of its own, or the groups of two tensors with each other.

    Scales are those of rows, as `kernels.cast_groups` makes them, applied to float32 sums. A group
    is `ends[e - 1]:ends[e]`, and may be empty.

    Args:
        a: [R, K] float8, contiguous, with scales [R]; its rows lie in groups.
            Or [N, R], with scales [E, N]; what is contracted lies in groups.
        b: [E, N, K] float8, contiguous along K, with scales [E, N]: one matrix for each group.
            Or [K, R], with scales [E, K].
        ends: [E] int32, ascending. Multiples of 128 where what is contracted lies in groups, as
            those of column data of `cast_groups` are.
        gemm: how; CPUs always multiply as `emulate` does. Its granularities are not read.
        out_dtype: float32, bfloat16 or float16.
        tokens: how many lie in groups of what is contracted, without the gaps between them; read
            by `FlopCounterMode` alone.

    Returns:
        [R, N]: of each group `a @ b[e].T`, and zeros in rows of no group.
        Or [E, N, K]: of each group `a @ b.T`.

    Raises:
        RuntimeError: the device has no such GEMM and `gemm.emulate` is False.
    """
    reason = None
    if not torch.compiler.is_compiling() and not gemm.emulate:
        reason = lacks_float8_gemm(a.data.device, True)  # Hopper's alone
    if reason is not None:
        raise RuntimeError(
            f"grouped float8 GEMM: {reason}; set emulate=True in Float8LinearConfig to compute in "
            f"high precision on the dequantised values"
        )
    return GROUPED_GEMM(  # type: ignore[no-any-return]
        *a, *b, ends, gemm.emulate, gemm.use_fast_accum, out_dtype, tokens
    )


def grouped_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiply groups of rows [R, N] and [R, K] of one dtype in it: [E, N, K], of each `a.T @ b`.

    An op of its own: compiled code has torch's for bfloat16 only.
    """
    return torch.ops.float8.grouped_outer.default(a, b, ends)  # type: ignore[no-any-return]


@torch.no_grad()
def _outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    N, K = a.shape[1], b.shape[1]
    if len(a) == 0:  # torch's takes no tensors without rows
        return _outer_fake(a, b, ends).zero_()
    # Nor rows that are not of 16 bytes.
    a, b = (F.pad(x, (0, -x.shape[1] % 8)) if x.shape[1] % 8 else x for x in (a, b))
    return F.grouped_mm(a.t(), b, offs=ends_of_groups(ends, len(a)))[:, :N, :K].contiguous()


def _outer_fake(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty((ends.shape[0], a.shape[1], b.shape[1]))


register(
    "grouped_outer",
    _outer,
    triton=_outer,
    fake=_outer_fake,
    flops=lambda a, b, *_, **__: 2 * a[0] * a[1] * b[1],
)
