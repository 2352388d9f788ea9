"""The grouped GEMM of a Hopper GPU under scales of blocks: adds scaled sums of 128 products.

One warp loads operands of tiles of 128 rows and 256 columns, up to `STAGES` steps early. Two groups
of four warps compute 64 rows each: while one scales and adds in float32, tensor cores multiply for
the other group. Written in Gluon, Triton's lower-level language, as Triton waits for each product
and reaches three quarters of the rate (benchmarks/NOTES.md).
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
MMA_REGS_OF_ROWS, LOAD_REGS_OF_ROWS = map(gl.constexpr, (224, 56))


def multiply_blocks(
    out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor
) -> None:
    """Write the scaled `a @ b.T` of each group to `out`; shapes are those of the kernel below."""
    if not HAS_GLUON:
        got = "float8 GEMM: got a Triton without Gluon for experts under blocks, expected"
        raise RuntimeError(f"{got} Triton >= 3.6; upgrade it, or take the recipe 'rowwise'")
    of_rows, (R, C), N, E = out.dim() == 2, a.shape, b.shape[1], ends.shape[0]  # groups split R
    rows, columns, block = _TILE
    # The arguments of layouts are the bytes of a swizzle, bits of an element, and number of dims.
    a_layout, b_layout = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(128, 8, 3)
    a_tiles = GluonDescriptor(a, [*a.shape], [*a.stride()], [rows, block], a_layout)
    b_tiles = GluonDescriptor(b, [*b.shape], [*b.stride()], [1, columns, block], b_layout)
    scale_tiles = b_tiles  # a placeholder: if `of_rows`, the kernel reads `b_scale` instead
    if not of_rows:
        x, layout = b_scale.t(), gl.NVMMASharedLayout(0, 32, 2)  # [C / 128, N], contiguous along N
        scale_tiles = GluonDescriptor(x, [*x.shape], [*x.stride()], [1, columns], layout)
    strides = *a_scale.stride(), b_scale.stride(0), *b_scale.stride()[-2:]
    _grouped_blocks_kernel[(sm_count(a.device),)](
        a_tiles, b_tiles, scale_tiles, a_scale, b_scale, ends, out, R, N, C, E, *strides, of_rows,
        num_warps=4,
    )  # fmt: skip


@gluon_jit
def _next_tile(tile, state, ends_ptr, sizes, OF_ROWS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Locate ``tile``, searching from the ``state`` of an earlier tile.

    Returns the new state (group, tiles before the group, tiles in it, its begin, its end); the
    tile's first row, one past the group's last row, the tile's first column; and the first index
    and the number of steps along C, the contraction dim. If ``OF_ROWS``, groups split the rows R,
    and the rows outside all groups form group E. Otherwise groups split C, and each has all rows.
    """
    group, before, count, begin, end = state
    R, N, C, E = sizes
    col_tiles = gl.cdiv(N, COLUMNS)
    groups = E + 1 if OF_ROWS else E
    while (tile >= before + count) & (group < groups):
        before += count
        begin = end
        group += 1
        if group < E:
            last = gl.minimum(gl.load(ends_ptr + group), R if OF_ROWS else C)
            end = gl.maximum(begin, last)
        elif OF_ROWS:  # group E
            end = R
        rows = end - begin if OF_ROWS else R
        count = gl.where(group < groups, gl.cdiv(rows, ROWS) * col_tiles, 0)
    # Tiles of a panel go down its rows, then right: what they read stays in the L2 cache.
    t = tile - before
    first = t // (PANEL * col_tiles) * PANEL  # the panel's first tile of rows
    row_tiles = gl.minimum(PANEL, gl.cdiv(end - begin if OF_ROWS else R, ROWS) - first)
    t = t % (PANEL * col_tiles)
    row, n = (first + t % row_tiles) * ROWS, t // row_tiles * COLUMNS
    zero = 0 * begin  # a tensor, where 0 would be a constant
    if OF_ROWS:
        row += begin
        end_row, k = end, zero
        steps = gl.where(group < E, gl.cdiv(C, BLOCK), 0)  # group E: none, so its sums are zeros
    else:
        end_row, k = R + zero, begin
        steps = (end - begin) // BLOCK  # groups are padded to multiples of BLOCK
    return (group, before, count, begin, end), row, end_row, n, k, steps


@gluon_jit
def _load(  # type: ignore[no-untyped-def]
    a_tiles, b_tiles, scale_tiles, shared, ends_ptr, sizes, OF_ROWS: gl.constexpr
):
    """Load operands of this program's tiles to shared memory, each step once its stage is empty."""
    a_shared, b_shared, scale_shared, full, empty = shared
    SCALES: gl.constexpr = 0 if OF_ROWS else scale_tiles.block_type.nbytes
    BYTES: gl.constexpr = a_tiles.block_type.nbytes + b_tiles.block_type.nbytes + SCALES
    tile, E = gl.program_id(0), sizes[3]
    groups = E + 1 if OF_ROWS else E  # group E, of rows outside all groups, has no steps
    zero = 0 * tile  # a tensor, where 0 would be a constant
    loads, state = zero, (zero - 1, zero, zero, zero, zero)  # before group 0
    state, row, _, n, k, steps = _next_tile(tile, state, ends_ptr, sizes, OF_ROWS)
    while state[0] < groups:  # state[0] is the group
        b_index = gl.minimum(state[0], E - 1) if OF_ROWS else zero
        for step in range(steps):
            stage, offset = loads % STAGES, k + step * BLOCK
            # Wait until both `_multiply` have read the stage; its first use does not wait.
            hopper.mbarrier.wait(empty.index(stage), ((loads // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            hopper.mbarrier.expect(bar, BYTES)
            async_load(a_tiles, [row, offset], bar, a_shared.index(stage))
            async_load(b_tiles, [b_index, n, offset], bar, b_shared.index(stage))
            if not OF_ROWS:
                async_load(scale_tiles, [offset // BLOCK, n], bar, scale_shared.index(stage))
            loads += 1
        tile += gl.num_programs(0)
        state, row, _, n, k, steps = _next_tile(tile, state, ends_ptr, sizes, OF_ROWS)


@gluon_jit
def _add(  # type: ignore[no-untyped-def]
    sums, a, a_scale, b_shared, b_scale, scale_shared, stage, zeros, SIDE: gl.constexpr,
    OF_ROWS: gl.constexpr,
):  # fmt: skip
    """Return ``sums`` plus the left (``SIDE`` 0) or right columns of the scaled ``a @ b.T``."""
    HALF: gl.constexpr = zeros.shape[1]  # of the columns of a tile
    b = b_shared.index(stage).reshape([2 * HALF, a.shape[1]]).slice(SIDE * HALF, HALF, 0)
    p = hopper.warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)
    p = hopper.warpgroup_mma_wait(0, deps=[p])
    if OF_ROWS:  # `b` has one scale for 128 x 128, so `b_scale` is a number
        p *= (a_scale * b_scale)[:, None]
    else:  # `b` has a scale for each of these columns, in shared memory
        scales = scale_shared.index(stage).reshape([2 * HALF]).slice(SIDE * HALF, HALF, 0)
        p = p * a_scale[:, None] * scales.load(gl.SliceLayout(0, p.type.layout))[None, :]
    return sums + p


@gluon_jit
def _store(sums, out_ptr, row, end_row, n, N):  # type: ignore[no-untyped-def]
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    y = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), lines)
    r = row + gl.arange(0, sums.shape[0], gl.SliceLayout(1, lines))
    c = n + gl.arange(0, sums.shape[1], gl.SliceLayout(0, lines))
    out_ptr += (r.to(gl.int64) * N)[:, None] + c[None, :]
    gl.store(out_ptr, y, mask=(r < end_row)[:, None] & (c < N)[None, :])


@gluon_jit
def _multiply(arguments, PART: gl.constexpr, OF_ROWS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the upper (``PART`` 0) or lower half of the rows of this program's tiles."""
    shared, a_scale_ptr, b_scale_ptr, out_ptr, ends_ptr, sizes, strides = arguments
    a_shared, b_shared, scale_shared, full, empty = shared
    stride_a, step_a, stride_b, row_b, step_b = strides  # step: to the next 128 along C
    R, N, _, E = sizes
    HALF_R: gl.constexpr = ROWS // 2
    HALF_C: gl.constexpr = COLUMNS // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_C, 32])
    zeros = gl.zeros([HALF_R, HALF_C], gl.float32, mma)
    tile, groups = gl.program_id(0), E + 1 if OF_ROWS else E  # group E: rows outside all groups
    zero = 0 * tile  # a tensor, where 0 would be a constant
    loads, state = zero, (zero - 1, zero, zero, zero, zero)  # before group 0
    state, row, end_row, n, k, steps = _next_tile(tile, state, ends_ptr, sizes, OF_ROWS)
    while state[0] < groups:  # state[0] is the group
        row += PART * HALF_R
        r = row + gl.arange(0, HALF_R, gl.SliceLayout(1, mma))
        inside = (r < end_row) & (steps > 0)
        a_ptr = a_scale_ptr + r * stride_a + k // BLOCK * step_a
        left_ptr = b_scale_ptr + n // BLOCK * row_b + k // BLOCK * step_b
        if OF_ROWS:  # `b_scale` has a matrix for each group; group E loads another's, unused
            left_ptr += gl.minimum(state[0], E - 1) * stride_b
        right_ptr = left_ptr + gl.where(n + HALF_C < N, HALF_C // BLOCK, 0) * row_b  # stays below N
        left, right, next_left, next_right = zeros, zeros, 0.0, 0.0
        # Load the scales one step early.
        next_a = gl.load(a_ptr, mask=inside, other=0.0)
        if OF_ROWS:  # else `_add` reads scales of `b` from `scale_shared`
            next_left, next_right = gl.load(left_ptr), gl.load(right_ptr)
        for step in range(steps):
            stage = loads % STAGES
            of_a, of_left, of_right = next_a, next_left, next_right
            ahead = gl.minimum(step + 1, steps - 1)  # the last step loads its own scales again
            next_a = gl.load(a_ptr + ahead * step_a, mask=inside, other=0.0)
            if OF_ROWS:
                next_left = gl.load(left_ptr + ahead * step_b)
                next_right = gl.load(right_ptr + ahead * step_b)
            hopper.mbarrier.wait(full.index(stage), (loads // STAGES) & 1)
            a = a_shared.index(stage).slice(PART * HALF_R, HALF_R, 0)
            left = _add(left, a, of_a, b_shared, of_left, scale_shared, stage, zeros, 0, OF_ROWS)
            right = _add(right, a, of_a, b_shared, of_right, scale_shared, stage, zeros, 1, OF_ROWS)
            hopper.mbarrier.arrive(empty.index(stage), count=1)
            loads += 1
        group_ptr = out_ptr
        if not OF_ROWS:  # `out` is [E, R, N]
            group_ptr += state[0].to(gl.int64) * R * N
        _store(left, group_ptr, row, end_row, n, N)
        _store(right, group_ptr, row, end_row, n + HALF_C, N)
        tile += gl.num_programs(0)
        state, row, end_row, n, k, steps = _next_tile(tile, state, ends_ptr, sizes, OF_ROWS)


@gluon_jit
def _grouped_blocks_kernel(  # type: ignore[no-untyped-def]
    a_tiles,  # [R, C], contiguous along C
    b_tiles,  # [E, N, C] if OF_ROWS, else [1, N, C]
    scale_tiles,  # scales of `b` unless OF_ROWS: [C / 128, N]
    a_scale_ptr,  # [R, C / 128]
    b_scale_ptr,  # scales of `b` if OF_ROWS: [E, N / 128, C / 128]
    ends_ptr,  # [E]: ends of groups along R if OF_ROWS, else along C
    out_ptr,  # [R, N] if OF_ROWS, else [E, R, N]
    R, N, C, E, stride_a, step_a, stride_b, row_b, step_b,  # strides of a_scale and b_scale
    OF_ROWS: gl.constexpr,  # whether groups split R; else they split C
):  # fmt: skip
    a_shared = gl.allocate_shared_memory(a_tiles.dtype, [STAGES, ROWS, BLOCK], a_tiles.layout)
    b_shared = gl.allocate_shared_memory(b_tiles.dtype, [STAGES, 1, COLUMNS, BLOCK], b_tiles.layout)
    scale_shared = b_shared  # a placeholder, not read if OF_ROWS
    if not OF_ROWS:
        scale_shared = gl.allocate_shared_memory(
            gl.float32, [STAGES, 1, COLUMNS], scale_tiles.layout
        )
    bar: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)  # a stage's loads have arrived
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)  # a stage has been read
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)  # by both `_multiply`
    shared, sizes = (a_shared, b_shared, scale_shared, full, empty), (R, N, C, E)
    strides = stride_a, step_a, stride_b, row_b, step_b
    arguments = shared, a_scale_ptr, b_scale_ptr, out_ptr, ends_ptr, sizes, strides
    gl.warp_specialize(
        [
            (_multiply, (arguments, 0, OF_ROWS)),  # in `num_warps`; it gets the remaining registers
            (_multiply, (arguments, 1, OF_ROWS)),
            (_load, (a_tiles, b_tiles, scale_tiles, shared, ends_ptr, sizes, OF_ROWS)),
        ],
        [4, 1],  # warps of the second `_multiply` and of `_load`; then registers of their threads
        [MMA_REGS_OF_ROWS, LOAD_REGS_OF_ROWS] if OF_ROWS else [MMA_REGS, LOAD_REGS],
    )
