"""The grouped GEMM of a Hopper GPU: each group of rows by a matrix of its own, or by another group.

`torch._scaled_grouped_mm` takes 1.04 to 1.2 times as long (benchmarks/NOTES.md). It also returns
no float32, and writes no zeros into rows of no group. The products, by the kernel's names:

    groups of rows    out [R, N] = a [R, C] by b [E, N, C] of the row's group        R are tokens
    of tokens         out [E, R, N] = a [R, C] by b [N, C], over C of each group     C are tokens

Under scales of blocks sums of 128 products are scaled, and added in float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import Granularity, ScalingGranularity
from float8.formats import GROUP_ALIGNMENT
from float8.kernels.cast_groups import check_offs, ends_of_groups, groups_of
from float8.kernels.dequantise import dequantised_by_kernel
from float8.kernels.grouped_blocks import multiply_blocks
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import TensorDescriptor, jit, sm_count, tl
from float8.kernels.swizzle import grouped_mm
from float8.scales import Operand, dequantised

_ROWS = ScalingGranularity.AXISWISE


def grouped_matmul_reference(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    emulate: bool,
    use_fast_accum: bool,
    out_dtype: torch.dtype,
    tokens: int | None = None,
    exact: torch.dtype = torch.float32,
    granularity_of_a: str = _ROWS.value,
    granularity_of_b: str = _ROWS.value,
) -> Tensor:
    """Multiply group by group: the plain-torch twin, see `gemm.grouped_matmul`.

    Under blocks it multiplies dequantised values, as a linear layer does where it emulates; in
    bfloat16, where the values are `exact` in it, without waiting for the ends. On a CPU, where
    nothing waits, ends of rows are checked.
    """
    if ends.is_cpu and b.dim() == 3:
        check_offs(ends, len(a))
    of_a, of_b = ScalingGranularity(granularity_of_a), ScalingGranularity(granularity_of_b)
    if exact == out_dtype == torch.bfloat16 and a.numel():
        return _in_bfloat16(Operand(a, a_scale), Operand(b, b_scale), ends, of_a, of_b)
    out = grouped_matmul_fake(a, None, b, None, ends, emulate, use_fast_accum, out_dtype).zero_()
    begin, of_rows, blocks, run = 0, b.dim() == 3, of_a.by_blocks, of_a.width or 1
    for group, end in enumerate(ends_of_groups(ends, a.shape[0 if of_rows else 1]).tolist()):
        if of_rows:
            x, w, to = a[begin:end], b[group], out[begin:end]
            scale, scale_b = a_scale[begin:end], b_scale[group]
        else:
            x, w, to = a[:, begin:end], b[:, begin:end], out[group]
            here = (slice(None), slice(begin // run, end // run)) if blocks else group
            scale, scale_b = a_scale[here], b_scale[here]
        if blocks:
            x, w = dequantised(Operand(x, scale), of_a), dequantised(Operand(w, scale_b), of_b)
        # Autocast would round the operands to its own dtype.
        with torch.autocast(a.device.type, enabled=False):
            product = x.float() @ w.float().t()
        if not blocks:
            product = product * scale[:, None] * scale_b
        to.copy_(product)
        begin = end
    return out


def _in_bfloat16(
    a: Operand, b: Operand, ends: Tensor, of_a: Granularity, of_b: Granularity
) -> Tensor:
    """Multiply values that bfloat16 holds exactly, under scales that are powers of two."""
    of_rows, scales = b.data.dim() == 3, (a.scale, b.scale)
    if not of_a.by_blocks and of_rows:
        a, b = (Operand(x.data, x.scale.unsqueeze(-1)) for x in (a, b))
    elif not of_a.by_blocks:  # sums are scaled instead, which rounds nothing
        a, b = (Operand(x.data, x.scale.new_ones(())) for x in (a, b))
        of_a = of_b = ScalingGranularity.TENSORWISE
    ends = ends_of_groups(ends, a.data.shape[0 if of_rows else 1])
    x, w = (dequantised_by_kernel(*each, torch.bfloat16) for each in ((a, of_a), (b, of_b)))
    y = F.grouped_mm(x, w.mT, offs=ends)
    if of_rows:
        there = torch.arange(len(y), device=ends.device)[:, None] < ends[-1]
    else:
        there = (ends.diff(prepend=ends.new_zeros(1)) > 0)[:, None, None]
        if of_a.one_scale:
            y = (y * scales[0][:, :, None]).mul_(scales[1][:, None]).to(y.dtype)
    return torch.where(there, y, 0)


def grouped_matmul_fake(a: Tensor, _: Any, b: Tensor, __: Any, ends: Tensor, *rest: Any) -> Tensor:
    """Allocate the result, uninitialised; sizes may be symbolic."""
    of_rows = b.dim() == 3
    shape = (a.shape[0], b.shape[1]) if of_rows else (ends.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=rest[2])


def _flops(a: Any, _: Any, b: Any, *rest: Any, **__: Any) -> Any:
    """Count those of all tokens: which of them are in no group only the device knows."""
    if len(b) == 3:
        return 2 * a[0] * a[1] * b[1]
    # Groups that are contracted lie with gaps: there are fewer tokens than columns.
    tokens = rest[5] if len(rest) > 5 else a[1]
    return 2 * tokens * a[0] * b[0]


# ---------------------------------------------------------------- Triton

_BLOCK = GROUP_ALIGNMENT  # of what is contracted, and of rows of the result
_PANEL = 16  # tiles of rows that share what is read of `b`


def _grouped_matmul_triton(*given: Any, **named: Any) -> Tensor:
    a, a_scale, b, b_scale, ends, emulate, use_fast_accum, out_dtype, *rest = given
    if emulate or a.numel() == 0:  # no rows, or no tokens that are contracted
        return grouped_matmul_reference(*given, **named)
    # Compiled code names the last arguments.
    last = {"granularity_of_a": _ROWS.value, "granularity_of_b": _ROWS.value} | named
    last |= zip(last, rest[2:], strict=False)
    covers, other = (ScalingGranularity(last[f"granularity_of_{x}"]) for x in "ab")
    if covers.exponents:
        both = Operand(a, a_scale), Operand(b, b_scale)
        return grouped_mm(*both, ends, (covers, other), out_dtype)
    out = grouped_matmul_fake(*given)
    of_rows = b.dim() == 3
    b = b if of_rows else b.unsqueeze(0)
    if covers.by_blocks:
        multiply_blocks(out, a, a_scale, b, b_scale, ends)
        return out
    (R, C), N, E = a.shape, b.shape[1], ends.shape[0]
    tiles_of_a = TensorDescriptor(a, a.shape, a.stride(), [_BLOCK, _BLOCK])
    # Wide tiles read less, which an H100 at its limit of power has time for. A second accumulator
    # leaves no registers for them.
    columns, programs, warps = (256, 1, 8) if use_fast_accum else (128, 2, 4)
    tiles_of_b = TensorDescriptor(b, b.shape, b.stride(), [1, columns, _BLOCK])
    stride = 0 if of_rows else a_scale.stride(0)
    sizes = R, N, C, E, stride, b_scale.stride(0)
    groups = max(1 << E.bit_length(), 16)  # E + 1 or more
    whole = use_fast_accum and out_dtype.itemsize == 2
    _grouped_matmul_kernel[(programs * sm_count(a.device),)](
        tiles_of_a, tiles_of_b, a_scale, b_scale, ends, out, *sizes, of_rows, use_fast_accum,
        groups, _BLOCK, columns, whole, _PANEL, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


@jit
def _place(  # type: ignore[no-untyped-def]
    tile, behind, tiles, begins, ends, R, C, tiles_n, E, OF_ROWS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """Place a tile.

    Returns its group, first row, the row behind the last one of its group, and first column; where
    it begins along C, and in how many steps it goes; and whether there is anything to add up.
    """
    g = tl.arange(0, GROUPS)
    group = tl.sum((behind <= tile).to(tl.int32), 0)
    here = g == group
    t = tile - tl.sum(tl.where(here, behind - tiles, 0), 0)
    begin = tl.sum(tl.where(here, begins, 0), 0)
    end = tl.sum(tl.where(here, ends, 0), 0)
    # Tiles of a panel go down its rows, then right: what they read stays in the L2 cache.
    tiles_m = tl.cdiv(end - begin, BLOCK) if OF_ROWS else tl.cdiv(R, BLOCK)
    panel = t // (PANEL * tiles_n) * PANEL
    high = min(PANEL, tiles_m - panel)
    t = t % (PANEL * tiles_n)
    m, n = (panel + t % high) * BLOCK, t // high * COLUMNS
    zero = 0 * m  # so that all are values, also what a shape makes a constant
    if OF_ROWS:
        row, end_row, k = begin + m, end, zero
        steps = tl.where(group < E, tl.cdiv(C, BLOCK), 1)  # one at least, to write zeros
    else:
        row, end_row, k = m, R + zero, begin
        steps = tl.maximum((end - begin) // BLOCK, 1)
    return group, row, end_row, n, k, steps, (end > begin) & (group < E)


@jit
def _store(sums, out_ptr, a_scale_ptr, b_scale_ptr, r, end_row, c, N, some):  # type: ignore[no-untyped-def]
    """Scale sums, and store them as rows `r` and columns `c`."""
    inside = r < end_row
    a_scale = tl.load(a_scale_ptr + r, mask=inside, other=0)
    b_scale = tl.load(b_scale_ptr + c, mask=c < N, other=0)
    # For an empty group a step has read of another one, which may be NaN.
    y = tl.where(some, sums * a_scale[:, None] * b_scale[None, :], 0.0)
    to = out_ptr + r.to(tl.int64)[:, None] * N + c[None, :]
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (c < N)[None, :])


@jit
def _grouped_matmul_kernel(  # type: ignore[no-untyped-def]
    a_tiles,  # [R, C], contiguous along C
    b_tiles,  # [E, N, C], or [1, N, C]
    a_scale_ptr,  # [R], or [E, R]
    b_scale_ptr,  # [E, N]
    ends_ptr,  # [E]: of rows, or of what is contracted
    out_ptr,  # [R, N], or [E, R, N]
    R, N, C, E, a_scale_stride, b_scale_stride,
    OF_ROWS: tl.constexpr, FAST: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, WHOLE: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """Run through the tiles of this program as one loop, which loads ahead from tile to tile."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    g = tl.arange(0, GROUPS)
    begins, ends = groups_of(ends_ptr, R if OF_ROWS else C, E, GROUPS)
    tiles_n = tl.cdiv(N, COLUMNS)
    if OF_ROWS:  # a group E of the rows that are in no other
        tiles = tl.where(g <= E, tl.cdiv(ends - begins, BLOCK) * tiles_n, 0)
        steps_of = tl.where(g < E, tl.cdiv(C, BLOCK), 1)
    else:
        tiles = tl.where(g < E, tl.cdiv(R, BLOCK) * tiles_n, 0)
        steps_of = tl.maximum((ends - begins) // BLOCK, 1)
    behind = tl.cumsum(tiles, 0)  # the tile behind the last one of each group
    mine = tl.cdiv(behind - program, programs) - tl.cdiv(behind - tiles - program, programs)
    # As after the last step of a tile before the first one.
    tile, step, steps = program - programs, -1, 0
    group, row, end_row, n, k = 0, 0, 0, 0, 0
    some = program < 0
    sums = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for _ in range(tl.sum(mine * steps_of, 0)):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += programs
            group, row, end_row, n, k, steps, some = _place(
                tile, behind, tiles, begins, ends, R, C, tiles_n, E, OF_ROWS, GROUPS, BLOCK,
                COLUMNS, PANEL,
            )  # fmt: skip
        a = a_tiles.load([row, k + step * BLOCK])
        matrix = tl.minimum(group, E - 1) if OF_ROWS else 0
        b = b_tiles.load([matrix, n, k + step * BLOCK]).reshape(COLUMNS, BLOCK)
        # Tensor cores add with few bits; else their sums are added in float32 after each step.
        sums = tl.dot(a, b.T, sums, max_num_imprecise_acc=None if FAST else BLOCK)
        if step == steps - 1:
            of_a, out = a_scale_ptr, out_ptr
            if not OF_ROWS:
                of_a += group * a_scale_stride
                out += tl.cast(group, tl.int64) * R * N
            of_b = b_scale_ptr + tl.minimum(group, E - 1) * b_scale_stride
            r = row + tl.arange(0, BLOCK)
            if WHOLE:
                _store(sums, out, of_a, of_b, r, end_row, n + tl.arange(0, COLUMNS), N, some)
            else:  # in halves, for which there is memory beside the loads ahead
                c = n + tl.arange(0, COLUMNS // 2)
                left, right = tl.split(sums.reshape(BLOCK, 2, COLUMNS // 2).permute(0, 2, 1))
                _store(left, out, of_a, of_b, r, end_row, c, N, some)
                _store(right, out, of_a, of_b, r, end_row, c + COLUMNS // 2, N, some)
            sums = tl.zeros((BLOCK, COLUMNS), tl.float32)


register(
    "grouped_matmul",
    grouped_matmul_reference,
    triton=_grouped_matmul_triton,
    fake=grouped_matmul_fake,
    flops=_flops,
)

GROUPED_GEMM = torch.ops.float8.grouped_matmul.default
