"""The door for grouped GEMMs: one product for each group of rows, as the tokens of experts are."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.formats import lacks_float8_gemm
from float8.gemm.matmul import Gemm
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.quantize.spec import Operand


def grouped_matmul(
    a: Operand,
    b: Operand,
    ends: Tensor,
    *,
    gemm: Gemm,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply each group by a matrix of its own, or the groups of two tensors with each other.

    Scales are those of rows, as `kernels.cast_groups` makes them, applied to float32 sums. A group
    is `ends[e - 1]:ends[e]`, and may be empty.

    Args:
        a: [R, K] float8, contiguous, with scales [R]; its rows lie in groups.
            Or [N, R], with scales [E, N]; what is contracted lies in groups.
        b: [E, N, K] float8, contiguous along K, with scales [E, N]: one matrix for each group.
            Or [K, R], with scales [E, K].
        ends: [E] int32, ascending. Multiples of 16 where what is contracted lies in groups.
        gemm: how; CPUs always multiply as `emulate` does. Its granularities are not read.
        out_dtype: float32, bfloat16 or float16; on GPUs bfloat16 is what there is.

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
    return torch.ops.float8.grouped_matmul.default(  # type: ignore[no-any-return]
        *a, *b, ends, gemm.emulate, gemm.use_fast_accum, out_dtype
    )


def grouped_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiply groups of rows [R, N] and [R, K] of one dtype in it: [E, N, K], of each `a.T @ b`.

    An op of its own: compiled code has torch's for bfloat16 only.
    """
    return torch.ops.float8.grouped_outer.default(a, b, ends)  # type: ignore[no-any-return]


def emulated(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    emulate: bool,
    use_fast_accum: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply group by group in float32: the plain twin."""
    out = _allocate(a, a_scale, b, b_scale, ends, out_dtype).zero_()
    begin = 0
    for group, end in enumerate(ends.tolist()):
        if b.dim() == 3:
            x, w, scale = a[begin:end], b[group], a_scale[begin:end]
        else:
            x, w, scale = a[:, begin:end], b[:, begin:end], a_scale[group]
        # Autocast would round the operands to its own dtype.
        with torch.autocast(a.device.type, enabled=False):
            product = x.float() @ w.float().t()
        product = product * scale[:, None] * b_scale[group]
        (out[begin:end] if b.dim() == 3 else out[group]).copy_(product)
        begin = end
    return out


def _on_gpu(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    emulate: bool,
    use_fast_accum: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    if emulate or a.shape[0] == 0:
        return emulated(a, a_scale, b, b_scale, ends, emulate, use_fast_accum, out_dtype)
    by_rows = b.dim() == 3
    if not by_rows:
        a_scale, b_scale = a_scale.view(-1), b_scale.view(-1)
    y = torch._scaled_grouped_mm(
        a,
        b.transpose(-2, -1),
        a_scale,
        b_scale,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=use_fast_accum,
    )
    if by_rows and y.numel():  # the rows of no group were not written
        rows, columns = y.shape
        block = 1 << (columns - 1).bit_length()
        clear: Any = _clear_behind_kernel
        clear[(min(rows, 1024),)](y, ends, rows, columns, ends.shape[0], block)
    return y.to(out_dtype)


@jit
def _clear_behind_kernel(y_ptr, ends_ptr, R, C, E, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    r = tl.load(ends_ptr + E - 1) + tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    while r < R:
        to = y_ptr + r.to(tl.int64) * C + c
        tl.store(to, tl.zeros((BLOCK_C,), y_ptr.dtype.element_ty), mask=c < C)
        r += tl.num_programs(0)


def _allocate(a: Tensor, _: Tensor, b: Tensor, __: Tensor, ends: Tensor, *how: Any) -> Tensor:
    by_rows = b.dim() == 3
    shape = (a.shape[0], b.shape[1]) if by_rows else (ends.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=how[-1])


register("grouped_matmul", emulated, triton=_on_gpu, fake=_allocate)


@torch.no_grad()
def _outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    N, K = a.shape[1], b.shape[1]
    if len(a) == 0:  # torch's takes no tensors without rows
        return _outer_fake(a, b, ends).zero_()
    # Nor rows that are not of 16 bytes.
    a, b = (F.pad(x, (0, -x.shape[1] % 8)) if x.shape[1] % 8 else x for x in (a, b))
    return F.grouped_mm(a.t(), b, offs=ends)[:, :N, :K].contiguous()


def _outer_fake(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty((ends.shape[0], a.shape[1], b.shape[1]))


register("grouped_outer", _outer, triton=_outer, fake=_outer_fake)
