"""The grouped GEMM of a Hopper GPU under block scales, which scales each sum of 128 products.

One warp loads operands of tiles of 128 rows and 256 columns, up to `STAGES` steps early. Two groups
of four warps compute 64 rows each: while one scales and adds in float32, tensor cores multiply for
the other group. Written in Gluon, Triton's lower-level language: a kernel in Triton waits for each
product, and reaches three quarters of the FLOP/s (benchmarks/NOTES.md).
"""

from torch import Tensor

from float8.kernels.runtime.triton import (
    HAS_GLUON,
    GluonDescriptor,
    async_load,
    gl,
    gluon_jit,
    hopper,
    sm_count,
)

_TILE = 128, 256, 128  # rows, columns, and elements of the contraction dim per step
ROWS, COLUMNS, BLOCK = map(gl.constexpr, _TILE)
STAGES = gl.constexpr(3)  # buffers for loads
PANEL = gl.constexpr(16)  # tiles of rows that share loads of `b`
# Registers of a thread that multiplies, and of a thread that loads. 224 suffice to hold the sums if
# groups split the rows; if groups split the contraction dim, 232 are 2 to 6 % faster (H200).
MMA_REGS, LOAD_REGS = map(gl.constexpr, (232, 24))
MMA_REGS_ROW_GROUPS, LOAD_REGS_ROW_GROUPS = map(gl.constexpr, (224, 56))


def multiply_blocks(
    out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor
) -> None:
    """Write the grouped product of float8 `a` and `b` under block scales of 128 to `out`.

    If `out` is [R, N], multiplies each group of rows of `a` [R, C] by `b[e].T`: `b` [E, N, C] has
    scales [E, ceil(N / 128), >= C / 128]. If `out` is [E, R, N], contracts `a` and `b` [1, N, C],
    scales [N, C / 128], over each group of columns. `a` has scales [R, C / 128]. `ends` [E] int32
    are one past the last row or, multiples of 128, column. Raises `RuntimeError` if Triton < 3.6.
    """
    if not HAS_GLUON:
        problem = "got a Triton without Gluon for experts under blocks, expected Triton >= 3.6"
        raise RuntimeError(f"float8 GEMM: {problem}; upgrade it, or take the recipe 'rowwise'")
    row_groups, (R, C), N, E = out.dim() == 2, a.shape, b.shape[1], ends.shape[0]  # groups split R
    rows, columns, block = _TILE
    # The arguments of layouts are the bytes of a swizzle, bits of an element, and number of dims.
    a_layout, b_layout = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(128, 8, 3)
    a_tiles = GluonDescriptor(a, [*a.shape], [*a.stride()], [rows, block], a_layout)
    b_tiles = GluonDescriptor(b, [*b.shape], [*b.stride()], [1, columns, block], b_layout)
    scale_tiles = b_tiles  # a placeholder: if `row_groups`, the kernel reads `b_scale` instead
    if not row_groups:
        scales, layout = b_scale.t(), gl.NVMMASharedLayout(0, 32, 2)  # [C / 128, N] row-major
        shape, strides = [*scales.shape], [*scales.stride()]
        scale_tiles = GluonDescriptor(scales, shape, strides, [1, columns], layout)
    scale_strides = *a_scale.stride(), b_scale.stride(0), *b_scale.stride()[-2:]
    _grouped_blocks_kernel[(sm_count(a.device),)](
        a_tiles, b_tiles, scale_tiles, a_scale, b_scale, ends, out, R, N, C, E,
        *scale_strides, row_groups, num_warps=4,
    )  # fmt: skip


@gluon_jit
def _next_tile(tile, search, ends_ptr, R_N_C_E, ROW_GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Find the group and the place of ``tile``, continuing the ``search`` for an earlier tile.

    ``search`` describes the group that was found: its index, the number of tiles in all groups
    before it, the number of tiles in it, and its begin and end: rows if ``ROW_GROUPS``, else
    indices along C, the contraction dim. Returns the new ``search``; the tile's first row, one past
    the last row to store, the tile's first column; the first index, and number of steps, along C.
    """
    group, tiles_before, group_tiles, begin, end = search
    R, N, C, E = R_N_C_E
    col_tiles = gl.cdiv(N, COLUMNS)
    groups = E + 1 if ROW_GROUPS else E  # group E has the rows outside all groups
    while (tile >= tiles_before + group_tiles) & (group < groups):
        tiles_before += group_tiles
        begin = end
        group += 1
        if group < E:
            last = gl.minimum(gl.load(ends_ptr + group), R if ROW_GROUPS else C)
            end = gl.maximum(begin, last)
        elif ROW_GROUPS:  # group E
            end = R
        rows = end - begin if ROW_GROUPS else R
        group_tiles = gl.where(group < groups, gl.cdiv(rows, ROWS) * col_tiles, 0)
    # Tiles of a panel go down its rows, then right: what they read stays in the L2 cache.
    tile_in_group = tile - tiles_before
    top = tile_in_group // (PANEL * col_tiles) * PANEL  # the panel's first tile of rows
    height = gl.minimum(PANEL, gl.cdiv(end - begin if ROW_GROUPS else R, ROWS) - top)
    tile_in_panel = tile_in_group % (PANEL * col_tiles)
    row, n = (top + tile_in_panel % height) * ROWS, tile_in_panel // height * COLUMNS
    zero = 0 * begin  # a tensor, as `begin` is; a literal 0 would be a constant
    if ROW_GROUPS:
        row += begin
        end_row, k = end, zero
        steps = gl.where(group < E, gl.cdiv(C, BLOCK), 0)  # group E: none, so its sums are zeros
    else:
        end_row, k = R + zero, begin
        steps = (end - begin) // BLOCK  # groups are padded to multiples of BLOCK
    return (group, tiles_before, group_tiles, begin, end), row, end_row, n, k, steps


@gluon_jit
def _load(  # type: ignore[no-untyped-def]
    a_tiles, b_tiles, scale_tiles, buffers, ends_ptr, R_N_C_E, ROW_GROUPS: gl.constexpr
):
    """Load operands of this program's tiles to STAGES ``buffers`` in turn, once these were read."""
    a_shared, b_shared, scale_shared, full, empty = buffers
    SCALE_BYTES: gl.constexpr = 0 if ROW_GROUPS else scale_tiles.block_type.nbytes
    BYTES: gl.constexpr = a_tiles.block_type.nbytes + b_tiles.block_type.nbytes + SCALE_BYTES
    tile, E = gl.program_id(0), R_N_C_E[3]
    groups = E + 1 if ROW_GROUPS else E  # group E, of rows outside all groups, has no steps
    zero = 0 * tile  # a tensor, as all later values are; a literal 0 would be a constant
    loads, search = zero, (zero - 1, zero, zero, zero, zero)  # none yet; before group 0
    search, row, _, n, k, steps = _next_tile(tile, search, ends_ptr, R_N_C_E, ROW_GROUPS)
    while search[0] < groups:  # search[0] is the group
        b_index = gl.minimum(search[0], E - 1) if ROW_GROUPS else zero
        for step in range(steps):
            stage, offset = loads % STAGES, k + step * BLOCK
            # Wait until both `_multiply` have read the stage; its first use does not wait.
            hopper.mbarrier.wait(empty.index(stage), ((loads // STAGES) & 1) ^ 1)
            loaded = full.index(stage)
            hopper.mbarrier.expect(loaded, BYTES)
            async_load(a_tiles, [row, offset], loaded, a_shared.index(stage))
            async_load(b_tiles, [b_index, n, offset], loaded, b_shared.index(stage))
            if not ROW_GROUPS:
                async_load(scale_tiles, [offset // BLOCK, n], loaded, scale_shared.index(stage))
            loads += 1
        tile += gl.num_programs(0)
        search, row, _, n, k, steps = _next_tile(tile, search, ends_ptr, R_N_C_E, ROW_GROUPS)


@gluon_jit
def _add(  # type: ignore[no-untyped-def]
    sums, a, a_scale, shared_b, b_scale, zeros, RIGHT: gl.constexpr, ROW_GROUPS: gl.constexpr
):
    """Add a step's scaled ``a @ b.T`` to ``sums`` of a tile's left (``RIGHT`` 0) or right half.

    ``shared_b`` are buffers of `b` and its scales, and which to read; ``zeros`` is like ``sums``.
    """
    b_shared, scale_shared, stage = shared_b  # buffers of `b` and its scales; which stage to read
    HALF: gl.constexpr = zeros.shape[1]  # half of a tile's columns
    b = b_shared.index(stage).reshape([2 * HALF, a.shape[1]]).slice(RIGHT * HALF, HALF, 0)
    term = hopper.warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)
    term = hopper.warpgroup_mma_wait(0, deps=[term])
    if ROW_GROUPS:  # `b` has one scale for 128 x 128, so `b_scale` is a number
        term *= (a_scale * b_scale)[:, None]
    else:  # `b` has a scale for each of these columns, in shared memory; `b_scale` is unused
        scales = scale_shared.index(stage).reshape([2 * HALF]).slice(RIGHT * HALF, HALF, 0)
        term = term * a_scale[:, None] * scales.load(gl.SliceLayout(0, term.type.layout))[None, :]
    return sums + term


@gluon_jit
def _store(sums, out_ptr, row, end_row, n, N):  # type: ignore[no-untyped-def]
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    y = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), lines)
    r = row + gl.arange(0, sums.shape[0], gl.SliceLayout(1, lines))
    c = n + gl.arange(0, sums.shape[1], gl.SliceLayout(0, lines))
    out_ptr += (r.to(gl.int64) * N)[:, None] + c[None, :]
    gl.store(out_ptr, y, mask=(r < end_row)[:, None] & (c < N)[None, :])


@gluon_jit
def _multiply(arguments, LOWER: gl.constexpr, ROW_GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Compute and store the upper (``LOWER`` 0) or lower (1) half of each tile of this program.

    The sums of a half are two tensors, of the tile's left and right columns. `_load` fills the
    buffers in ``arguments``. If ``ROW_GROUPS``, groups split R, and the scales of `b`, one per 128
    x 128, are loaded here; else groups split C, at multiples of 128, and `_load` loads the scales.
    """
    buffers, a_scale_ptr, b_scale_ptr, out_ptr, ends_ptr, R_N_C_E, strides = arguments
    a_shared, b_shared, scale_shared, full, empty = buffers
    a_stride_r, a_stride_c, b_stride_e, b_stride_n, b_stride_c = strides
    R, N, _, E = R_N_C_E
    HALF_R: gl.constexpr = ROWS // 2
    HALF_N: gl.constexpr = COLUMNS // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_N, 32])
    zeros = gl.zeros([HALF_R, HALF_N], gl.float32, mma)
    tile, groups = gl.program_id(0), E + 1 if ROW_GROUPS else E  # group E: rows outside all groups
    zero = 0 * tile  # a tensor, as all later values are; a literal 0 would be a constant
    loads, search = zero, (zero - 1, zero, zero, zero, zero)  # none yet; before group 0
    search, row, end_row, n, k, steps = _next_tile(tile, search, ends_ptr, R_N_C_E, ROW_GROUPS)
    while search[0] < groups:  # search[0] is the group
        row += LOWER * HALF_R
        r = row + gl.arange(0, HALF_R, gl.SliceLayout(1, mma))
        inside = (r < end_row) & (steps > 0)
        a_ptr = a_scale_ptr + r * a_stride_r + k // BLOCK * a_stride_c  # scales
        left_ptr = b_scale_ptr + n // BLOCK * b_stride_n + k // BLOCK * b_stride_c
        if ROW_GROUPS:  # group E has no weight: it loads the last group's scales, unused
            left_ptr += gl.minimum(search[0], E - 1) * b_stride_e
        # A right half outside N loads the scales of the left half; its results are not stored.
        right_ptr = left_ptr + gl.where(n + HALF_N < N, HALF_N // BLOCK, 0) * b_stride_n
        left, right, next_left, next_right = zeros, zeros, 0.0, 0.0
        next_a = gl.load(a_ptr, mask=inside, other=0.0)  # scales are loaded one step early
        if ROW_GROUPS:
            next_left, next_right = gl.load(left_ptr), gl.load(right_ptr)
        for step in range(steps):
            stage = loads % STAGES
            a_scale, left_scale, right_scale = next_a, next_left, next_right
            ahead = gl.minimum(step + 1, steps - 1)  # the last step loads its own scales again
            next_a = gl.load(a_ptr + ahead * a_stride_c, mask=inside, other=0.0)
            if ROW_GROUPS:
                next_left = gl.load(left_ptr + ahead * b_stride_c)
                next_right = gl.load(right_ptr + ahead * b_stride_c)
            hopper.mbarrier.wait(full.index(stage), (loads // STAGES) & 1)  # phase: flips per use
            a = a_shared.index(stage).slice(LOWER * HALF_R, HALF_R, 0)
            b = b_shared, scale_shared, stage
            left = _add(left, a, a_scale, b, left_scale, zeros, 0, ROW_GROUPS)
            right = _add(right, a, a_scale, b, right_scale, zeros, 1, ROW_GROUPS)
            hopper.mbarrier.arrive(empty.index(stage), count=1)
            loads += 1
        group_ptr = out_ptr
        if not ROW_GROUPS:  # `out` is [E, R, N]
            group_ptr += search[0].to(gl.int64) * R * N
        _store(left, group_ptr, row, end_row, n, N)
        _store(right, group_ptr, row, end_row, n + HALF_N, N)
        tile += gl.num_programs(0)
        search, row, end_row, n, k, steps = _next_tile(tile, search, ends_ptr, R_N_C_E, ROW_GROUPS)


@gluon_jit
def _grouped_blocks_kernel(  # type: ignore[no-untyped-def]
    a_tiles,  # descriptor of [R, C], contiguous along C
    b_tiles,  # descriptor of [E, N, C] if ROW_GROUPS, else [1, N, C]
    scale_tiles,  # descriptor of the scales of `b` [C / 128, N], unused if ROW_GROUPS
    a_scale_ptr,  # [R, C / 128]
    b_scale_ptr,  # scales of `b` if ROW_GROUPS: [E, ceil(N / 128), C / 128 or more]
    ends_ptr,  # [E]: ends of groups along R if ROW_GROUPS, else along C
    out_ptr,  # [R, N] if ROW_GROUPS, else [E, R, N]
    R, N, C, E, a_stride_r, a_stride_c, b_stride_e, b_stride_n, b_stride_c,  # strides of scales
    ROW_GROUPS: gl.constexpr,  # whether groups split R; else they split C
):  # fmt: skip
    """Compute the grouped GEMM: one warp runs `_load`, and two times four warps run `_multiply`."""
    a_shared = gl.allocate_shared_memory(a_tiles.dtype, [STAGES, ROWS, BLOCK], a_tiles.layout)
    b_shared = gl.allocate_shared_memory(b_tiles.dtype, [STAGES, 1, COLUMNS, BLOCK], b_tiles.layout)
    scale_shared = b_shared  # a placeholder, not read if ROW_GROUPS
    if not ROW_GROUPS:
        scale_shared = gl.allocate_shared_memory(
            gl.float32, [STAGES, 1, COLUMNS], scale_tiles.layout
        )
    bar: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)  # a stage holds its operands
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)  # both `_multiply` have read it
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)  # one for each `_multiply`
    buffers, R_N_C_E = (a_shared, b_shared, scale_shared, full, empty), (R, N, C, E)
    strides = a_stride_r, a_stride_c, b_stride_e, b_stride_n, b_stride_c
    arguments = buffers, a_scale_ptr, b_scale_ptr, out_ptr, ends_ptr, R_N_C_E, strides
    gl.warp_specialize(
        [
            (_multiply, (arguments, 0, ROW_GROUPS)),  # `num_warps` warps, the remaining registers
            (_multiply, (arguments, 1, ROW_GROUPS)),
            (_load, (a_tiles, b_tiles, scale_tiles, buffers, ends_ptr, R_N_C_E, ROW_GROUPS)),
        ],
        [4, 1],  # warps of the second `_multiply` and of `_load`; then registers of their threads
        [MMA_REGS_ROW_GROUPS, LOAD_REGS_ROW_GROUPS] if ROW_GROUPS else [MMA_REGS, LOAD_REGS],
    )
