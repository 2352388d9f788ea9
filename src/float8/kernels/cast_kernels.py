"""The Triton kernels of `cast`: one casts a tile, one whole rows, one measures rows and columns."""

from float8.kernels import numeric, tiles
from float8.kernels.runtime.triton import jit, tl

ONE, ROWS, RUNS, SQUARES = range(4)
BLOCKS = {(None, None): ONE, (1, None): ROWS, (1, 128): RUNS, (128, 128): SQUARES}
BLOCKS |= {(1, 32): RUNS, (32, 32): SQUARES}
"""The block of a scale, by height and width: all; a row, of either layout; a part; a square."""

GIVEN, MEASURED, HISTORY = range(3)
"""Where one scale comes from: it is given; measured, from amaxes to be joined; or from the history,
and measured only where that knows none. Finer scales, which the kernel finds, are said GIVEN."""


@jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])  # type: ignore[untyped-decorator]
def cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    along_ptr,  # [rows, Ck]
    along_scale_ptr,  # of ROWS [rows], of RUNS [runs, rows], of SQUARES [.. down, .. across to 4]
    across_ptr,  # [columns, Rk]
    across_scale_ptr,  # likewise
    scale_ptr,
    amaxes_ptr,  # amaxes: of ONE [count] float32; of ROWS [R + C] int32: bits, of rows, of columns
    used_ptr,
    amax_ptr,  # is raised to the amax of x
    R, C, stride_r, stride_c, count,
    COVERS: tl.constexpr,
    WIDTH: tl.constexpr,  # of RUNS and SQUARES
    ALONG: tl.constexpr, ACROSS: tl.constexpr,
    PAD_ALONG: tl.constexpr,  # whether rows are padded
    PAD_ACROSS: tl.constexpr,
    SOURCE: tl.constexpr,
    COUNT: tl.constexpr,  # a power of two, not below count
    RECORD: tl.constexpr,
    ROUNDED: tl.constexpr,  # whether x is rounded to bfloat16 first
    MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Cast one tile of a matrix."""
    HOW: tl.constexpr = (MANTISSA, POWER_OF_2, HARDWARE)
    K: tl.constexpr = WIDTH if COVERS >= 2 else 16  # pads contracted dims, those of RUNS, SQUARES
    PAD: tl.constexpr = WIDTH if COVERS == 3 else 16  # pads the other dims
    Rk, Ck = tl.cdiv(R, K) * K, tl.cdiv(C, K) * K
    rows = tl.cdiv(R, PAD) * PAD if PAD_ALONG else R
    columns = tl.cdiv(C, PAD) * PAD if PAD_ACROSS else C
    tile = tl.program_id(0)
    if COVERS != 1:  # ROWS were measured backwards, so their beginning is in the L2 cache
        tile = tiles.tile_of_program()
    R16, C16 = tl.cdiv(R, 16) * 16, tl.cdiv(C, 16) * 16
    tile_r, tile_c = tiles.tile_at(tile, R16, C16, BLOCK_R, BLOCK_C, GROUP)
    quad, c = tiles.quads_of(tile_r, tile_c, BLOCK_R, BLOCK_C)
    r = tiles.rows_of(quad)
    inside = [(each < R) & (c < C) for each in r]
    x = tiles.load_rows(x_ptr + c * stride_c, r, stride_r, inside, EVEN)
    v = [numeric.to_float32(each, HARDWARE) for each in x]
    element: tl.constexpr = x_ptr.dtype.element_ty
    if ROUNDED:
        v = [numeric.rounded_to_bfloat16(each, HARDWARE) for each in v]
    if COVERS == 0:  # ONE
        if SOURCE == 1:  # MEASURED
            scale = tl.full((), 0.0, tl.float32)
        else:
            scale = tl.load(scale_ptr)
        if SOURCE != 0:  # not GIVEN
            if scale == 0.0:
                at = tl.arange(0, COUNT)
                amaxes = amaxes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at
                largest = tl.max(tl.load(amaxes, at < count, 0))
                scale = numeric.scale_of_amax(largest, (MANTISSA, POWER_OF_2, False))
            if tl.program_id(0) == 0:
                tl.store(used_ptr, scale)
        if RECORD:
            largest = tl.max(tl.max(tiles.largest_of(x), axis=1), axis=0)
            bits = numeric.float32_bits(largest, element)
            amax_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            # Thousands of programs would queue up for one address, and few of them have news.
            if bits > tl.load(amax_ptr, volatile=True):
                tl.atomic_max(amax_ptr, bits, sem="relaxed")
        v = times_any(v, tl.div_rn(1.0, scale), inside, EVEN)
    if COVERS == 2:  # RUNS; here, one row after the other: so threads need the fewest registers
        m = [numeric.magnitude_bits(each) for each in x]
        largest = tiles.largest_of(x)
    if COVERS == 3:  # SQUARES
        squares = tiles.over_blocks(tiles.largest_of(x), WIDTH // 4, WIDTH)
        bits = numeric.float32_bits(squares, element)
        scale, inverse = numeric.scale_and_inverse(bits, HOW)
        if ALONG:
            store_squares(along_scale_ptr, scale, tile_r, tile_c, rows // WIDTH, Ck // WIDTH)
        if ACROSS:
            of_t = tl.trans(scale)
            store_squares(across_scale_ptr, of_t, tile_c, tile_r, columns // WIDTH, Rk // WIDTH)
        inverse = tiles.spread(inverse, WIDTH // 4, WIDTH)
        v = tiles.times(v, [inverse for _ in v], inside, EVEN)
    if ALONG:  # before ACROSS, which takes more registers
        w = v
        if COVERS == 1:  # ROWS
            bits = [tiles.load(amaxes_ptr + each, each < R, EVEN) for each in r]
            scales = [numeric.scale_of_amax(each, HOW) for each in bits]
            if tile_c == 0:
                tiles.store_scales(along_scale_ptr, quad, scales, rows)
            w = tiles.times(v, [numeric.reciprocal(s, HARDWARE) for s in scales], inside, EVEN)
        if COVERS == 2:  # RUNS
            ptr = along_scale_ptr + tile_c.to(tl.int64) * (BLOCK_C // WIDTH) * rows
            runs = (Ck - tile_c * BLOCK_C) // WIDTH
            inverse = [
                store_runs(ptr, m[i], r[i], 0, rows, rows, runs, 1, WIDTH, element, HOW)
                for i in (0, 1, 2, 3)
            ]
            w = tiles.times(v, inverse, inside, EVEN)
        tiles.store_along(along_ptr, w, quad, c, rows, Ck, HOW, EVEN)
    if ACROSS:
        w = v
        if COVERS == 1 or COVERS == 2:  # ROWS or RUNS
            if COVERS == 1:
                bits = tiles.load(amaxes_ptr + R + c, c < C, EVEN)
                scale = numeric.scale_of_amax(bits, HOW)
                if tile_r == 0:
                    tl.store(across_scale_ptr + c, scale, mask=c < columns)
                inverse = numeric.reciprocal(scale, HARDWARE)
            else:
                first = tile_r * (BLOCK_R // WIDTH)
                inverse = store_runs(
                    across_scale_ptr, largest, c, first, columns, columns, Rk // WIDTH, WIDTH // 4,
                    1, element, HOW,
                )  # fmt: skip
            w = tiles.times(v, [inverse for _ in v], inside, EVEN)
        words = numeric.to_float8_words(w, HOW)
        tiles.store_words(across_ptr, words, quad, c, columns, Rk // 4, EVEN)


@jit
def store_runs(  # type: ignore[no-untyped-def]
    ptr, m, lines, first, end, pitch, runs, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    element: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Store the scales [runs, pitch] of runs of magnitudes, from run ``first`` on.

    Runs go along ``lines``, which are rows, of ``HEIGHT`` 1, or columns, of ``WIDTH`` 1; those from
    ``end`` on are left out. Returns a reciprocal for each place.
    """
    bits = numeric.float32_bits(tiles.over_blocks(m, HEIGHT, WIDTH), element)
    scale, inverse = numeric.scale_and_inverse(bits, HOW)
    if HEIGHT == 1:
        run = first + tl.arange(0, bits.shape[1])[None, :]
    else:
        run = first + tl.arange(0, bits.shape[0])[:, None]
    tl.store(ptr + run.to(tl.int64) * pitch + lines, scale, mask=(lines < end) & (run < runs))
    return tiles.spread(inverse, HEIGHT, WIDTH)


@jit
def times_any(v, inverse, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply four float32 by the ``inverse`` of any scale; zero where not ``inside``."""
    # An Inf in v must become NaN, though a product that overflows saturates. Inf * 0 is NaN, and
    # to add a zero of the product's own sign changes nothing else, contracted to an FMA or not.
    zero = (inverse.to(tl.int32, bitcast=True) & -0x80000000).to(tl.float32, bitcast=True)
    return [tiles.or_zero(v[i] * inverse + v[i] * zero, inside[i], EVEN) for i in (0, 1, 2, 3)]


@jit
def store_squares(ptr, scale, tile_r, tile_c, down, across):  # type: ignore[no-untyped-def]
    """Store the scales of the squares of a tile, and zeros up to columns of a multiple of 4."""
    # Of one square: three zeros behind it, if it is the last one.
    wide: tl.constexpr = max(scale.shape[1], 4)
    row = tile_r * scale.shape[0] + tl.arange(0, scale.shape[0])[:, None]
    step = tl.arange(0, wide)[None, :]
    column = tile_c * scale.shape[1] + step
    if scale.shape[1] == 4:
        scale = tl.where(column < across, scale, 0.0)
        inside = column < tl.cdiv(across, 4) * 4
    else:
        scale = tl.where(step == 0, scale, 0.0)
        behind = (tile_c == across - 1 + 0 * step) & (column < tl.cdiv(across, 4) * 4)
        inside = (step == 0) | behind
    pitch = tl.cdiv(across, 4) * 4
    tl.store(ptr + row.to(tl.int64) * pitch + column, scale, mask=(row < down) & inside)


@jit
def cast_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    data_ptr,  # [rows, C padded to 16]
    scale_ptr,  # [rows]
    R, C, stride_r, stride_c,
    PAD: tl.constexpr,  # whether rows are padded
    MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Cast some whole rows, each held in registers, each under a scale of its own."""
    HOW: tl.constexpr = (MANTISSA, POWER_OF_2, HARDWARE)
    rows, Cp = tl.cdiv(R, 16) * 16 if PAD else R, tl.cdiv(C, 16) * 16
    # 64-bit, so that offsets are.
    r = (tiles.tile_of_program() * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    inside = (r < R) & (c < C)
    x = tiles.load(x_ptr + r * stride_r + c.to(tl.int64) * stride_c, inside, EVEN)
    m = numeric.magnitude_bits(x)
    inverse = store_runs(scale_ptr, m, r, 0, rows, rows, 1, 1, BLOCK_C, x.dtype, HOW)
    # An Inf becomes NaN by itself: its scale is Inf or NaN.
    v = tiles.or_zero(numeric.to_float32(x, HARDWARE) * inverse, inside, EVEN)
    data_ptr = data_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + r * Cp + c
    tiles.store(data_ptr, numeric.to_float8_bits(v, HOW), (r < rows) & (c < Cp), EVEN)


@jit
def measure_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    amax_ptr,  # [R + C] int32, zeros: is raised to the bits of amaxes, of rows, then of columns
    R, C, stride_r, stride_c,
    rows,  # of a program
    OF_ROWS: tl.constexpr, OF_COLUMNS: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Measure rows and columns, down a strip."""
    across = tl.cdiv(C, BLOCK_C)
    walk = tiles.tile_of_program()
    begin = walk // across * rows
    end = tl.minimum(begin + rows, R)
    tiles.measure_strip(
        x_ptr, amax_ptr, amax_ptr + R, begin, end, walk % across, C, stride_r, stride_c,
        OF_ROWS, OF_COLUMNS, False, EVEN, BLOCK_R, BLOCK_C,
    )  # fmt: skip
