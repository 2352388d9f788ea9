"""The grouped GEMM of a Hopper GPU, with groups of rows or groups along the contraction dim.

`torch._scaled_grouped_mm` takes 1.04 to 1.2 times as long (benchmarks/NOTES.md), cannot return
float32, and leaves rows outside all groups unwritten. With the kernel's names, the GEMMs are:

    groups of rows      out [R, N] = a [R, C] @ b[group of the row].T, b [E, N, C]    R are tokens
    groups of tokens    out[e] [R, N] = a[:, group e] @ b[:, group e].T, b [N, C]     C are tokens

`a` and `b` have a scale per row, or per row and group of tokens. Under block scales
`multiply_blocks` computes the same, and under those of MXFP8 `multiply_mx` does.
"""

from typing import Any

import torch
from torch import Tensor

from float8.experts.kernels.cast_groups import check_offs, ends_of_groups, groups_of, vector_length
from float8.experts.kernels.grouped_blocks import multiply_blocks
from float8.experts.kernels.torch_gemms import multiply_in_bfloat16, multiply_mx
from float8.formats import GROUP_ALIGNMENT
from float8.gemm import GEMM_OPS, Gemm, exact_dtype
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import TensorDescriptor, jit, sm_count, tl
from float8.scales import Operand, dequantised


def grouped_matmul_reference(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, tokens: int | None,
    gemm: str, out_dtype: torch.dtype,  # tokens: for `_flops` only; gemm: by `Gemm.packed`
) -> Tensor:  # fmt: skip
    """Multiply groups of float8 operands in high precision, as CPUs do, and GPUs that emulate.

    For all groups, which end before ``ends`` [E], returns `a[group] @ b[e].T`, [R, N], if ``b`` is
    [E, N, C], and `a[:, group] @ b[:, group].T`, [E, R, N], if ``b`` is [N, C]. Loops over groups
    with a sync or, for a bfloat16 result on GPUs under powers of two, calls torch's grouped GEMM.
    """
    if ends.is_cpu and b.dim() == 3:  # a check on a GPU would sync
        check_offs(ends, len(a))
    settings = Gemm.unpacked(gemm)
    granularity_a, granularity_b = granularities = settings.granularities
    use_bfloat16 = settings.powers_of_2 and exact_dtype(a.device) == out_dtype == torch.bfloat16
    if use_bfloat16 and a.numel():
        return multiply_in_bfloat16(Operand(a, a_scale), Operand(b, b_scale), ends, granularities)
    out = grouped_matmul_fake(a, a_scale, b, b_scale, ends, out_dtype).zero_()
    begin, row_groups, blocks = 0, b.dim() == 3, granularity_a.by_blocks
    run = granularity_a.width or 1  # elements along C that share a block scale
    for group, end in enumerate(ends_of_groups(ends, a.shape[0 if row_groups else 1]).tolist()):
        if row_groups:
            x, w, result = a[begin:end], b[group], out[begin:end]
            x_scale, w_scale = a_scale[begin:end], b_scale[group]
        else:
            x, w, result = a[:, begin:end], b[:, begin:end], out[group]
            part = (slice(None), slice(begin // run, end // run)) if blocks else group
            x_scale, w_scale = a_scale[part], b_scale[part]  # of [R, C / run] if blocks, or [E, R]
        if blocks:  # scales change along C: multiply by them before the products are added
            x = dequantised(Operand(x, x_scale), granularity_a)
            w = dequantised(Operand(w, w_scale), granularity_b)
        # Autocast would round the operands to its own dtype.
        with torch.autocast(a.device.type, enabled=False):
            product = x.float() @ w.float().t()
        if not blocks:  # one scale for each row of `x` and of `w`
            product = product * x_scale[:, None] * w_scale
        result.copy_(product)
        begin = end
    return out


def grouped_matmul_fake(
    a: Tensor, _: Tensor, b: Tensor, __: Tensor, ends: Tensor, *settings: Any
) -> Tensor:  # settings[-1]: the dtype of the result
    """Allocate the result of ``a`` [R, K]: [R, N] if ``b`` is [E, N, K], [E, R, N] if [N, K]."""
    shape = (a.shape[0], b.shape[1]) if b.dim() == 3 else (ends.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=settings[-1])


def _flops(a: Any, _: Any, b: Any, __: Any, ends: Any, tokens: Any, *rest: Any, **kw: Any) -> Any:
    """Return the FLOPs of shapes ``a``, ``b``; ``tokens``: columns of ``a`` without padding."""
    if len(b) == 3:
        return 2 * a[0] * a[1] * b[1]  # only the device knows which rows are in no group
    return 2 * (a[1] if tokens is None else tokens) * a[0] * b[0]  # columns include padding


BLOCK = tl.constexpr(GROUP_ALIGNMENT)  # of the contraction dim, and of rows of the result
PANEL = tl.constexpr(16)  # tiles of rows that share loads of `b`


def _grouped_matmul_triton(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, tokens: int | None,
    gemm: str, out_dtype: torch.dtype,  # tokens: for `_flops` only; gemm: by `Gemm.packed`
) -> Tensor:  # fmt: skip
    """Multiply groups by the GPU's GEMM for the granularity, or emulate if ``gemm`` says so."""
    operands, settings = (a, a_scale, b, b_scale, ends), Gemm.unpacked(gemm)
    granularities, fast = settings.granularities, settings.use_fast_accum
    if settings.emulate or a.numel() == 0:  # no rows, or no tokens
        return grouped_matmul_reference(*operands, tokens, gemm, out_dtype)
    if granularities[0].exponents:  # MXFP8
        y = multiply_mx(Operand(a, a_scale), Operand(b, b_scale), ends, granularities)
        return y.to(out_dtype)
    out, row_groups = grouped_matmul_fake(*operands, out_dtype), b.dim() == 3
    b = b if row_groups else b.unsqueeze(0)
    if granularities[0].by_blocks:
        multiply_blocks(out, a, a_scale, b, b_scale, ends)
        return out
    (R, C), N, E = a.shape, b.shape[1], ends.shape[0]
    tiles_of_a = TensorDescriptor(a, a.shape, a.stride(), [GROUP_ALIGNMENT, GROUP_ALIGNMENT])
    # Wide tiles read less memory, which is faster on an H100 that is at its power limit. If not
    # `fast`, the second accumulator leaves no registers for them.
    columns, programs_per_sm, warps = (256, 1, 8) if fast else (128, 2, 4)
    tiles_of_b = TensorDescriptor(b, b.shape, b.stride(), [1, columns, GROUP_ALIGNMENT])
    sizes = R, N, C, E, a_scale.stride(0), b_scale.stride(0)
    whole = fast and out_dtype.itemsize == 2  # a tile of `out` fits into shared memory beside loads
    _grouped_matmul_kernel[(programs_per_sm * sm_count(a.device),)](
        tiles_of_a, tiles_of_b, a_scale, b_scale, ends, out, *sizes, row_groups, fast,
        vector_length(E), columns, whole, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


@jit
def _place(  # type: ignore[no-untyped-def]
    tile, tile_ends, tiles,  # group g has `tiles[g]` tiles, the last one before `tile_ends[g]`
    begins, ends, R, C,  # of groups: rows if ROW_GROUPS, else indices along C, which is contracted
    tiles_n, E, ROW_GROUPS: tl.constexpr,  # tiles_n: tiles side by side; group E: rows in no group
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr,  # length of vectors over groups; columns of a tile
):  # fmt: skip
    """Locate tile ``tile`` of the result.

    Returns its group, its first row, one past the last row to store, its first column, the first
    index and number of steps of 128 along C, and whether there is anything to multiply.
    """
    g = tl.arange(0, GROUPS)
    group = tl.sum((tile_ends <= tile).to(tl.int32), 0)  # the number of groups before it
    is_group = g == group  # a sum over this mask reads the group's entry
    tile_in_group = tile - tl.sum(tl.where(is_group, tile_ends - tiles, 0), 0)
    begin = tl.sum(tl.where(is_group, begins, 0), 0)
    end = tl.sum(tl.where(is_group, ends, 0), 0)
    # Tiles of a panel go down its rows, then right, so that their operands stay in the L2 cache.
    tiles_m = tl.cdiv(end - begin, BLOCK) if ROW_GROUPS else tl.cdiv(R, BLOCK)
    top = tile_in_group // (PANEL * tiles_n) * PANEL  # the panel's first tile of rows
    height = min(PANEL, tiles_m - top)
    tile_in_panel = tile_in_group % (PANEL * tiles_n)
    m, n = (top + tile_in_panel % height) * BLOCK, tile_in_panel // height * COLUMNS
    zero = 0 * m  # a tensor; so is R + zero, even if R is 1 and so a constant
    if ROW_GROUPS:
        row, end_row, k = begin + m, end, zero
        steps = tl.where(group < E, tl.cdiv(C, BLOCK), 1)  # at least one, to write zeros
    else:
        row, end_row, k = m, R + zero, begin
        steps = tl.maximum((end - begin) // BLOCK, 1)  # groups are padded to multiples of BLOCK
    return group, row, end_row, n, k, steps, (end > begin) & (group < E)


@jit
def _store(sums, out_ptr, a_scale_ptr, b_scale_ptr, r, end_row, c, N, nonempty):  # type: ignore[no-untyped-def]
    """Store scaled ``sums``, or 0 unless ``nonempty``, at rows r < ``end_row``, columns c < N."""
    inside = r < end_row
    a_scale = tl.load(a_scale_ptr + r, mask=inside, other=0)
    b_scale = tl.load(b_scale_ptr + c, mask=c < N, other=0)
    # The step of an empty group has read data of another group, which may be NaN.
    y = tl.where(nonempty, sums * a_scale[:, None] * b_scale[None, :], 0.0)
    ptrs = out_ptr + r.to(tl.int64)[:, None] * N + c[None, :]
    tl.store(ptrs, y.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (c < N)[None, :])


@jit
def _grouped_matmul_kernel(  # type: ignore[no-untyped-def]
    a_tiles,  # [R, C], contiguous along C
    b_tiles,  # [E, N, C] if ROW_GROUPS, else [1, N, C]
    a_scale_ptr,  # [R] if ROW_GROUPS, else [E, R]
    b_scale_ptr,  # [E, N]
    ends_ptr,  # [E], ends of groups along R if ROW_GROUPS, else along C
    out_ptr,  # [R, N] if ROW_GROUPS, else [E, R, N]
    R, N, C, E, a_scale_stride, b_scale_stride,  # between groups; the first unused if ROW_GROUPS
    ROW_GROUPS: tl.constexpr, FAST: tl.constexpr,  # FAST: add in the tensor cores alone
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr,  # length of vectors over groups; columns of a tile
    WHOLE: tl.constexpr,  # whether to store a tile at once; else in halves
):  # fmt: skip
    """Compute the grouped GEMM; one loop over all tiles lets the next tile's loads start early."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    g = tl.arange(0, GROUPS)
    begins, ends = groups_of(ends_ptr, R if ROW_GROUPS else C, E, GROUPS)
    tiles_n = tl.cdiv(N, COLUMNS)
    if ROW_GROUPS:  # group E has the rows outside all groups
        tiles = tl.where(g <= E, tl.cdiv(ends - begins, BLOCK) * tiles_n, 0)
        group_steps = tl.where(g < E, tl.cdiv(C, BLOCK), 1)  # as `_place` returns them
    else:
        tiles = tl.where(g < E, tl.cdiv(R, BLOCK) * tiles_n, 0)
        group_steps = tl.maximum((ends - begins) // BLOCK, 1)
    tile_ends = tl.cumsum(tiles, 0)  # one past the last tile of each group
    # Count this program's tiles of each group; its tiles are program, program + programs, ...
    first_tiles = tile_ends - tiles - program
    own_tiles = tl.cdiv(tile_ends - program, programs) - tl.cdiv(first_tiles, programs)
    # Start as if a tile before this program's first one had just made its last step.
    tile, step, steps = program - programs, -1, 0
    group, row, end_row, n, k = 0, 0, 0, 0, 0
    nonempty = program < 0  # False, as a tensor
    sums = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for _ in range(tl.sum(own_tiles * group_steps, 0)):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += programs
            group, row, end_row, n, k, steps, nonempty = _place(
                tile, tile_ends, tiles, begins, ends, R, C, tiles_n, E, ROW_GROUPS, GROUPS, COLUMNS
            )
        a = a_tiles.load([row, k + step * BLOCK])
        matrix = tl.minimum(group, E - 1) if ROW_GROUPS else 0  # group E: any one; it stores 0
        b = b_tiles.load([matrix, n, k + step * BLOCK]).reshape(COLUMNS, BLOCK)
        # Tensor cores add with few bits; unless FAST, each step's sums are added in float32.
        sums = tl.dot(a, b.T, sums, max_num_imprecise_acc=None if FAST else BLOCK)
        if step == steps - 1:
            a_scales, out = a_scale_ptr, out_ptr
            if not ROW_GROUPS:
                a_scales += group * a_scale_stride
                out += tl.cast(group, tl.int64) * R * N
            b_scales = b_scale_ptr + tl.minimum(group, E - 1) * b_scale_stride
            r = row + tl.arange(0, BLOCK)
            c = n + tl.arange(0, COLUMNS if WHOLE else COLUMNS // 2)
            if WHOLE:
                _store(sums, out, a_scales, b_scales, r, end_row, c, N, nonempty)
            else:  # in halves, which fit into shared memory beside the prefetched loads
                left, right = tl.split(sums.reshape(BLOCK, 2, COLUMNS // 2).permute(0, 2, 1))
                _store(left, out, a_scales, b_scales, r, end_row, c, N, nonempty)
                _store(right, out, a_scales, b_scales, r, end_row, c + COLUMNS // 2, N, nonempty)
            sums = tl.zeros((BLOCK, COLUMNS), tl.float32)


register(
    "grouped_matmul", grouped_matmul_reference, triton=_grouped_matmul_triton,
    fake=grouped_matmul_fake, flops=_flops,
)  # fmt: skip

GROUPED_GEMM = torch.ops.float8.grouped_matmul.default
GEMM_OPS.add(GROUPED_GEMM)
