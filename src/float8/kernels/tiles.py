"""Tiles of a matrix inside Triton kernels: which program takes which, and how it holds one.

Along: as the kernel reads x, that is row data, or column data where it reads x.t(). Across: the
transposed copy.

Kernels that write a transposed 1-byte copy hold a tile as four tiles, of every fourth row each. The
bytes that come to lie next to each other in the copy are in the same place of the four: packed into
32-bit words, they go through shared memory as words, four times fewer items than bytes.

``quad`` [BLOCK_R / 4, 1] numbers groups of four rows, ``c`` [1, BLOCK_C] the columns; both are
64-bit, so that offsets are. What is called four below is a tuple: of each group the first rows,
the second, the third and the fourth, [BLOCK_R / 4, BLOCK_C].
"""

from typing import Any

import torch

from float8.formats import ceil16
from float8.kernels.numeric import float32_bits, magnitude_bits, to_float8_bits
from float8.kernels.runtime.launch import Launch
from float8.kernels.runtime.triton import jit, sm_count, tl

Tile = tuple[int, int, int]
"""Its rows and columns, powers of two from 16 on, and the warps of the program that takes it."""

ROW_TILES: tuple[Tile, ...] = ((16, 256, 4), (16, 128, 2))
"""For kernels that write no transposed copy."""

COL_TILES: tuple[Tile, ...] = ((128, 128, 8), (64, 64, 4), (32, 64, 4))
"""For kernels that write one: 128 x 128 writes whole 128-byte lines in both."""

GROUP = 8
"""Tiles follow each other down this many tiles of R, then along C."""


def tiled(
    kernel: Any,
    tiles: tuple[Tile, ...],
    device: torch.device,
    integers: tuple[int, ...],
    constants: tuple[object, ...] = (),
) -> Launch:
    """Return the launch of a kernel each of whose programs takes one tile of a matrix [R, C].

    By the first of ``tiles``, largest first, that gives each multiprocessor two programs, or the
    last. EVEN: the tiles fill the matrix exactly, which takes no masks.
    """
    (R, C, *_), sms = integers, sm_count(device)
    for tile in tiles:
        block_r, block_c, num_warps = tile
        programs = -(-ceil16(R) // block_r) * -(-ceil16(C) // block_c)
        if programs >= 2 * sms:
            break
    even = R % block_r == 0 and C % block_c == 0
    constants = (*constants, even, block_r, block_c, GROUP)
    return Launch(kernel, device, programs, integers, constants, num_warps)


@jit
def reversed_tile():  # type: ignore[no-untyped-def]
    """Number the tile of this program: backwards, since the end of x is still in the L2 cache."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@jit
def tile_at(  # type: ignore[no-untyped-def]
    tile, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr
):
    """Place a tile, in groups: so programs at work together touch long runs of both copies."""
    tiles_r = tl.cdiv(R, BLOCK_R)
    tiles_c = tl.cdiv(C, BLOCK_C)
    group = tile // (GROUP * tiles_c)
    height = tl.minimum(tiles_r - group * GROUP, GROUP)
    within = tile - group * (GROUP * tiles_c)
    return group * GROUP + within % height, within // height


@jit
def load(ptrs, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load where ``inside``, zero elsewhere; everywhere, without a mask, if ``EVEN``."""
    if EVEN:
        values = tl.load(ptrs)
    else:
        values = tl.load(ptrs, mask=inside, other=0)
    return values


@jit
def or_zero(v, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``v`` where ``inside``, zero elsewhere; all of it if ``EVEN``."""
    if not EVEN:
        v = tl.where(inside, v, 0.0)  # also where it is NaN
    return v


@jit
def store(ptrs, values, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store where ``inside``; everywhere, without a mask, if ``EVEN``."""
    if EVEN:
        tl.store(ptrs, values)
    else:
        tl.store(ptrs, values, mask=inside)


# ---------------------------------------------------------------- a tile as four


@jit
def tile_quads(tile_r, tile_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``quad`` and ``c`` of the tile of this row and column, counted in tiles."""
    quad = (tile_r * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)).to(tl.int64)[:, None]
    c = (tile_c * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    return quad, c


@jit
def quad_rows(quad):  # type: ignore[no-untyped-def]
    """Number the rows, four [BLOCK_R / 4, 1]."""
    return quad * 4, quad * 4 + 1, quad * 4 + 2, quad * 4 + 3


@jit
def load_rows(ptr, rows, stride, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load four of these ``rows``; ``ptr`` is where the columns of row 0 lie."""
    return [load(ptr + rows[i] * stride, inside[i], EVEN) for i in (0, 1, 2, 3)]


@jit
def largest_magnitudes(x):  # type: ignore[no-untyped-def]
    """Return the bits of the largest magnitude in each place of four."""
    m = [magnitude_bits(each) for each in x]
    return tl.maximum(tl.maximum(m[0], m[1]), tl.maximum(m[2], m[3]))


@jit
def block_max(m, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest of each block of so many rows and columns of a matrix."""
    if m.shape[1] == WIDTH:
        m = tl.max(m, axis=1, keep_dims=True)
    elif WIDTH != 1:
        m = tl.reshape(m, (m.shape[0], m.shape[1] // WIDTH, WIDTH))
        m = tl.max(m, axis=2)
    if m.shape[0] == HEIGHT:
        m = tl.max(m, axis=0, keep_dims=True)
    elif HEIGHT != 1:
        m = tl.reshape(m, (m.shape[0] // HEIGHT, HEIGHT, m.shape[1]))
        m = tl.max(m, axis=1)
    return m


@jit
def repeat_blocks(s, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Repeat each element of a matrix over such a block; where all are one, it broadcasts."""
    if HEIGHT != 1 and s.shape[0] != 1:
        s = tl.broadcast_to(s[:, None, :], (s.shape[0], HEIGHT, s.shape[1]))
        s = tl.reshape(s, (s.shape[0] * HEIGHT, s.shape[2]))
    if WIDTH != 1 and s.shape[1] != 1:
        s = tl.broadcast_to(s[:, :, None], (s.shape[0], s.shape[1], WIDTH))
        s = tl.reshape(s, (s.shape[0], s.shape[1] * WIDTH))
    return s


@jit
def times(v, inverse, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply four float32 by four reciprocals of scales; zero where not ``inside``.

    Inf becomes NaN by its scale, that of an amax which covers it.
    """
    return [or_zero(v[i] * inverse[i], inside[i], EVEN) for i in (0, 1, 2, 3)]


@jit
def store_row_scales(ptr, quad, scales, rows):  # type: ignore[no-untyped-def]
    """Store the scales [BLOCK_R / 4, 1] of four rows each, to a vector of so many ``rows``."""
    r = quad_rows(quad)
    for i in tl.static_range(4):
        tl.store(ptr + r[i], scales[i], mask=r[i] < rows)


@jit
def store_row_data(  # type: ignore[no-untyped-def]
    ptr,
    v,
    quad,
    c,
    rows,
    Cp,
    ARITHMETIC: tl.constexpr,
    EVEN: tl.constexpr,
    EVEN_C: tl.constexpr = False,
):
    """Store four float32 as float8 [rows, Cp]; ``EVEN_C``: tiles fill the columns, not the rows."""
    ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + c
    r = quad_rows(quad)
    for i in tl.static_range(4):
        inside = r[i] < rows
        if not EVEN_C:
            inside = inside & (c < Cp)
        store(ptr + r[i] * Cp, to_float8_bits(v[i], ARITHMETIC), inside, EVEN)


@jit
def store_col_data(ptr, words, quad, c, rows, pitch, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store words [BLOCK_R / 4, BLOCK_C] transposed, as uint32 [rows, pitch]."""
    c, quad = tl.trans(c), tl.trans(quad)
    ptr = ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + c * pitch + quad
    store(ptr, tl.trans(words), (c < rows) & (quad < pitch), EVEN)


# ---------------------------------------------------------------- strips of tiles

# A program that measures goes down a strip, one tile after the other: amaxes of programs are joined
# by atomics, of which a GPU does few per second, and those of columns are due once for each strip.

STRIP_WARPS, STRIP_R, STRIP_BYTES, MOST_TILES = 4, 64, 256, 8
"""Of a tile of a strip: its warps, its rows, and the bytes of each; most tiles of a program."""


def strips_of(R: int, C: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int, int]:
    """Share a matrix [R, C]: rows of a program, columns of its strip, how many strips there are.

    Programs are so short that each multiprocessor has some, where that leaves a tile.
    """
    block_c = STRIP_BYTES // dtype.itemsize
    strips = -(-C // block_c)
    tiles = -(-R // STRIP_R) * strips // (8 * sm_count(device))
    return STRIP_R * min(max(tiles, 1), MOST_TILES), block_c, strips


@jit
def measure_strip(  # type: ignore[no-untyped-def]
    x_ptr,  # the matrix: where row 0 lies
    of_row_ptr,  # int32 of row 0: is raised to the bits of the amaxes of rows; or that of all
    of_column_ptr,  # int32 of column 0: the same of columns
    begin, end, strip, C, stride_r, stride_c, OF_ROWS: tl.constexpr, OF_COLUMNS: tl.constexpr,
    OF_ALL: tl.constexpr,  # neither of both, but the largest of all
    EVEN: tl.constexpr,  # strips fill the columns exactly
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Measure the rows from ``begin`` to ``end``, in the columns of this strip."""
    element: tl.constexpr = x_ptr.dtype.element_ty
    # 64-bit, so that offsets are.
    c = (strip * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    x_ptr += c[None, :] * stride_c
    largest = magnitude_bits(tl.zeros((BLOCK_R, BLOCK_C), element))
    row = begin
    while row < end:  # Triton's interpreter (3.6) takes no range of tensors
        # The last row again where there are no more: that raises nothing.
        r = tl.minimum(row + tl.arange(0, BLOCK_R), end - 1).to(tl.int64)
        bits = magnitude_bits(load(x_ptr + r[:, None] * stride_r, c[None, :] < C, EVEN))
        if OF_COLUMNS or OF_ALL:
            largest = tl.maximum(largest, bits)
        if OF_ROWS:
            of_rows = float32_bits(tl.max(bits, axis=1), element)
            tl.atomic_max(of_row_ptr + r, of_rows, sem="relaxed")
        row += BLOCK_R
    if OF_COLUMNS:
        of_columns = float32_bits(tl.max(largest, axis=0), element)
        tl.atomic_max(of_column_ptr + c, of_columns, mask=c < C, sem="relaxed")
    if OF_ALL:
        bits = float32_bits(tl.max(tl.max(largest, axis=1), axis=0), element)
        tl.atomic_max(of_row_ptr, bits, sem="relaxed")
