"""The Triton kernels of `cast`: one casts tiles, one casts whole rows, one measures amaxes.

Row and column data are those of the matrix that a kernel reads, which may be ``x.t()``.
"""

from float8.kernels import numeric, tiles
from float8.kernels.runtime.triton import jit, tl


@jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])  # type: ignore[untyped-decorator]
def cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    row_ptr,  # [rows, Ck]: Ck is C padded to 16, or to WIDTH if "run", "square": runs * WIDTH
    row_scale_ptr,  # "row": [rows]; "run": [runs, rows]; "square": [rows / WIDTH, ceil4(runs)]
    col_ptr,  # [columns, Rk]: Rk is R, padded in the same way
    col_scale_ptr,  # as row_scale_ptr, with columns and Rk in place of rows and Ck
    scale_ptr,  # "tensor": the scale, unless it is measured
    amaxes_ptr,  # "tensor": [count] float32; "row": [R + C] int32, bits of rows, then of columns
    used_ptr,  # "tensor": receives the scale that is used, unless it is given
    amax_ptr,  # "recorded": is raised to the amax of x
    R, C, stride_r, stride_c, count,  # sizes and strides of x; the number of amaxes of a "tensor"
    GRANULARITY: tl.constexpr, WIDTH: tl.constexpr, SOURCE: tl.constexpr,
    COUNT: tl.constexpr,  # count, rounded up to a power of two
    ROW: tl.constexpr, COL: tl.constexpr,
    PAD_ROWS: tl.constexpr, PAD_COLS: tl.constexpr,  # pad R in row data; pad C in column data
    ROUNDED: tl.constexpr,  # whether x is rounded to bfloat16 first
    MANTISSA: tl.constexpr,  # bits of the format: 3 of e4m3, 2 of e5m2
    POWER_OF_2: tl.constexpr,  # scales are 0: not rounded, 1: powers of two, 2: MXFP8's exponents
    HARDWARE: tl.constexpr, EVEN: tl.constexpr,  # the GPU converts to float8; tiles need no mask
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,  # as `tiles.tile_at` says
):  # fmt: skip
    """Cast one tile of [R, C] to row data, column data (the transposed copy) or both, with scales.

    GRANULARITY says what one scale covers: the "tensor"; a "row" of row or column data; a "run" of
    WIDTH elements in such a row; a "square" of WIDTH x WIDTH elements. SOURCE says how the scale of
    a "tensor" is found: "given" reads scale_ptr; "measured" takes the maximum of amaxes_ptr; "kept"
    reads scale_ptr, and amaxes_ptr if that scale is 0; "recorded" also raises amax_ptr.
    """
    ARITHMETIC: tl.constexpr = (MANTISSA, POWER_OF_2, HARDWARE)
    BLOCKS: tl.constexpr = GRANULARITY == "run" or GRANULARITY == "square"
    K: tl.constexpr = WIDTH if BLOCKS else 16  # pads R to Rk and C to Ck
    PAD: tl.constexpr = WIDTH if GRANULARITY == "square" else 16  # pads R to rows, C to columns
    Rk, Ck = tl.cdiv(R, K) * K, tl.cdiv(C, K) * K
    rows = tl.cdiv(R, PAD) * PAD if PAD_ROWS else R
    columns = tl.cdiv(C, PAD) * PAD if PAD_COLS else C
    tile = tl.program_id(0)
    if GRANULARITY != "row":  # "row": `measure_kernel` left the first rows in the L2 cache
        tile = tiles.reversed_tile()
    R16, C16 = tl.cdiv(R, 16) * 16, tl.cdiv(C, 16) * 16  # tiles cover the padding, too
    tile_r, tile_c = tiles.tile_at(tile, R16, C16, BLOCK_R, BLOCK_C, GROUP)
    quad, c = tiles.tile_quads(tile_r, tile_c, BLOCK_R, BLOCK_C)  # groups of 4 rows, columns
    r = tiles.quad_rows(quad)  # of the four tensors that hold the tile
    inside = [(row < R) & (c < C) for row in r]
    x = tiles.load_rows(x_ptr + c * stride_c, r, stride_r, inside, EVEN)
    v = [numeric.to_float32(values, HARDWARE) for values in x]
    element: tl.constexpr = x_ptr.dtype.element_ty
    if ROUNDED:
        v = [numeric.rounded_to_bfloat16(values, HARDWARE) for values in v]
    if GRANULARITY == "tensor":
        if SOURCE == "measured":
            scale = tl.full((), 0.0, tl.float32)
        else:
            scale = tl.load(scale_ptr)
        if SOURCE != "given":
            if scale == 0.0:
                index = tl.arange(0, COUNT)
                amaxes = amaxes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + index
                largest = tl.max(tl.load(amaxes, index < count, 0))
                scale = numeric.scale_of_amax(largest, (MANTISSA, POWER_OF_2, False))  # a division
            if tl.program_id(0) == 0:
                tl.store(used_ptr, scale)
        if SOURCE == "recorded":
            largest = tl.max(tl.max(tiles.largest_magnitudes(x), axis=1), axis=0)
            bits = numeric.float32_bits(largest, element)
            amax_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            # Thousands of programs would queue up for one address, and few of them raise it.
            if bits > tl.load(amax_ptr, volatile=True):
                tl.atomic_max(amax_ptr, bits, sem="relaxed")
        v = times_any_inverse(v, tl.div_rn(1.0, scale), inside, EVEN)
    if GRANULARITY == "run":  # bits that are computed here take fewer registers than elsewhere
        magnitudes = [numeric.magnitude_bits(values) for values in x]
        largest = tiles.largest_magnitudes(x)
    if GRANULARITY == "square":
        squares = tiles.block_max(tiles.largest_magnitudes(x), WIDTH // 4, WIDTH)
        bits = numeric.float32_bits(squares, element)
        scale, inverse = numeric.scale_and_inverse(bits, ARITHMETIC)
        if ROW:
            store_square_scales(row_scale_ptr, scale, tile_r, tile_c, rows // WIDTH, Ck // WIDTH)
        if COL:
            scale_t = tl.trans(scale)
            store_square_scales(
                col_scale_ptr, scale_t, tile_c, tile_r, columns // WIDTH, Rk // WIDTH
            )
        inverse = tiles.repeat_blocks(inverse, WIDTH // 4, WIDTH)
        v = tiles.times(v, [inverse for _ in v], inside, EVEN)
    if ROW:  # before COL, which takes more registers
        row_values = v
        if GRANULARITY == "row":
            bits = [tiles.load(amaxes_ptr + row, row < R, EVEN) for row in r]
            scales = [numeric.scale_of_amax(amax, ARITHMETIC) for amax in bits]
            if tile_c == 0:
                tiles.store_row_scales(row_scale_ptr, quad, scales, rows)
            inverse = [numeric.reciprocal(scale, HARDWARE) for scale in scales]
            row_values = tiles.times(v, inverse, inside, EVEN)
        if GRANULARITY == "run":
            ptr = row_scale_ptr + tile_c.to(tl.int64) * (BLOCK_C // WIDTH) * rows
            runs = (Ck - tile_c * BLOCK_C) // WIDTH
            inverse = [
                store_run_scales(
                    ptr, magnitudes[i], r[i], 0, rows, rows, runs, 1, WIDTH, element, ARITHMETIC
                )
                for i in (0, 1, 2, 3)
            ]
            row_values = tiles.times(v, inverse, inside, EVEN)
        tiles.store_row_data(row_ptr, row_values, quad, c, rows, Ck, ARITHMETIC, EVEN)
    if COL:
        col_values = v
        if GRANULARITY == "row" or GRANULARITY == "run":
            if GRANULARITY == "row":
                bits = tiles.load(amaxes_ptr + R + c, c < C, EVEN)
                scale = numeric.scale_of_amax(bits, ARITHMETIC)
                if tile_r == 0:
                    tl.store(col_scale_ptr + c, scale, mask=c < columns)
                inverse = numeric.reciprocal(scale, HARDWARE)
            else:
                first_run = tile_r * (BLOCK_R // WIDTH)
                inverse = store_run_scales(
                    col_scale_ptr, largest, c, first_run, columns, columns, Rk // WIDTH, WIDTH // 4,
                    1, element, ARITHMETIC,
                )  # fmt: skip
            col_values = tiles.times(v, [inverse for _ in v], inside, EVEN)
        words = numeric.to_float8_words(col_values, ARITHMETIC)
        tiles.store_col_data(col_ptr, words, quad, c, columns, Rk // 4, EVEN)


@jit
def store_run_scales(  # type: ignore[no-untyped-def]
    ptr, magnitudes, lines, first_run, end, pitch, runs, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    element: tl.constexpr, ARITHMETIC: tl.constexpr,  # mantissa bits, rounding of scales, HARDWARE
):  # fmt: skip
    """Compute a scale for each run of elements in a tile, store the scales, and return 1 / scale.

    ``magnitudes`` are the bits of abs(x) of the tile's elements x, of dtype ``element``. A run is a
    part of a row of ``magnitudes`` (1 x WIDTH elements) or of a column (HEIGHT x 1). These rows or
    columns have the indices ``lines``; in each, the tile's first run has the index ``first_run``.
    The scale of run i in line j goes to ``ptr + i * pitch + j`` if i < ``runs`` and j < ``end``.
    """
    bits = numeric.float32_bits(tiles.block_max(magnitudes, HEIGHT, WIDTH), element)
    scale, inverse = numeric.scale_and_inverse(bits, ARITHMETIC)
    if HEIGHT == 1:
        run = first_run + tl.arange(0, bits.shape[1])[None, :]
    else:
        run = first_run + tl.arange(0, bits.shape[0])[:, None]
    tl.store(ptr + run.to(tl.int64) * pitch + lines, scale, mask=(lines < end) & (run < runs))
    return tiles.repeat_blocks(inverse, HEIGHT, WIDTH)  # can be broadcast to `magnitudes`


@jit
def times_any_inverse(v, inverse, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``v[i] * inverse``, NaN where v[i] is Inf, 0 if not ``inside[i]``; EVEN: all are."""
    # An Inf in v must become NaN, although a product that overflows saturates. Inf * 0 is NaN, and
    # adding a zero of the product's sign changes no other value, contracted to an FMA or not.
    zero = (inverse.to(tl.int32, bitcast=True) & -0x80000000).to(tl.float32, bitcast=True)
    return [tiles.or_zero(v[i] * inverse + v[i] * zero, inside[i], EVEN) for i in (0, 1, 2, 3)]


@jit
def store_square_scales(ptr, scale, tile_r, tile_c, rows, columns):  # type: ignore[no-untyped-def]
    """Store the scales of a tile's squares in the matrix [rows, columns] of all tiles' scales.

    The tile is in tile row ``tile_r`` and tile column ``tile_c``. Rows of the matrix, at ``ptr``,
    are zero-padded to a multiple of 4 scales.
    """
    # A tile has 4 x 4 squares of 32, or one of 128. The last tile of a row also pads with zeros.
    slots: tl.constexpr = max(scale.shape[1], 4)
    row = tile_r * scale.shape[0] + tl.arange(0, scale.shape[0])[:, None]
    slot, pitch = tl.arange(0, slots)[None, :], tl.cdiv(columns, 4) * 4
    column = tile_c * scale.shape[1] + slot
    if scale.shape[1] == 4:
        scale = tl.where(column < columns, scale, 0.0)
        inside = column < pitch
    else:  # one square, in slot 0; in the row's last tile the other slots are padding
        scale = tl.where(slot == 0, scale, 0.0)
        is_last = column - slot == columns - 1
        inside = (slot == 0) | (is_last & (column < pitch))
    tl.store(ptr + row.to(tl.int64) * pitch + column, scale, mask=(row < rows) & inside)


@jit
def cast_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    data_ptr,  # [rows, Cp]: rows is R, padded to 16 if PAD_ROWS; Cp is C, padded to 16
    scale_ptr,  # [rows]
    R, C, stride_r, stride_c, PAD_ROWS: tl.constexpr,
    MANTISSA: tl.constexpr,  # bits of the format: 3 of e4m3, 2 of e5m2
    POWER_OF_2: tl.constexpr,  # scales are 0: not rounded, 1: rounded up to powers of two
    HARDWARE: tl.constexpr, EVEN: tl.constexpr,  # the GPU converts to float8; no mask is needed
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Cast BLOCK_R whole rows, held in registers, to float8, and store a scale for each row."""
    ARITHMETIC: tl.constexpr = (MANTISSA, POWER_OF_2, HARDWARE)
    rows, Cp = tl.cdiv(R, 16) * 16 if PAD_ROWS else R, tl.cdiv(C, 16) * 16
    r = (tiles.reversed_tile() * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]  # 64-bit `r`, since offsets may exceed 32 bits
    inside = (r < R) & (c < C)
    x = tiles.load(x_ptr + r * stride_r + c.to(tl.int64) * stride_c, inside, EVEN)
    magnitudes = numeric.magnitude_bits(x)
    inverse = store_run_scales(
        scale_ptr, magnitudes, r, 0, rows, rows, 1, 1, BLOCK_C, x.dtype, ARITHMETIC
    )  # first_run 0, and 1 run: 1 x BLOCK_C is a whole row
    # An Inf becomes NaN without further code, since the scale of its row is Inf or NaN.
    v = tiles.or_zero(numeric.to_float32(x, HARDWARE) * inverse, inside, EVEN)
    data_ptr = data_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + r * Cp + c
    tiles.store(data_ptr, numeric.to_float8_bits(v, ARITHMETIC), (r < rows) & (c < Cp), EVEN)


@jit
def measure_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    amax_ptr,  # [R + C] int32, zeros; raised to the bits of the amaxes of rows, then of columns
    R, C, stride_r, stride_c,
    rows,  # the number of rows that one program reads
    ROW: tl.constexpr, COL: tl.constexpr, EVEN: tl.constexpr,  # EVEN: loads need no mask
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Raise the amaxes of rows (ROW) and of columns (COL), by atomic max, from one part of x."""
    strips = tl.cdiv(C, BLOCK_C)
    tile = tiles.reversed_tile()  # backwards, so that L2 has the first rows for `cast_kernel`
    begin = tile // strips * rows
    end = tl.minimum(begin + rows, R)
    tiles.measure_strip(
        x_ptr, amax_ptr, amax_ptr + R, begin, end, tile % strips, C, stride_r, stride_c,
        ROW, COL, False, EVEN, BLOCK_R, BLOCK_C,  # False: ALL, an amax of all elements
    )  # fmt: skip
