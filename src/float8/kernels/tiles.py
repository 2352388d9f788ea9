"""Tiles of a matrix inside Triton kernels: their order, loads, stores and reductions.

Kernels that write a transposed 1-byte copy hold a tile as four tensors [BLOCK_R / 4, BLOCK_C];
tensor i has the rows i, i + 4, i + 8 and so on. Four neighboring bytes of the copy are then at one
position of the four tensors, and are packed into a 32-bit word, so that four times fewer items go
through shared memory. ``quad`` [BLOCK_R / 4, 1] has the indices of groups of four rows, ``c``
[1, BLOCK_C] those of columns; they are 64-bit integers, since offsets may exceed 32 bits.
"""

from typing import Any

import torch

from float8.kernels.numeric import float32_bits, magnitude_bits, to_float8_bits
from float8.kernels.runtime.launch import Launch
from float8.kernels.runtime.triton import jit, sm_count, tl

Tile = tuple[int, int, int]
"""Rows and columns, powers of two from 16 on, and the warps of the program for the tile."""

ROW_TILES: tuple[Tile, ...] = ((16, 256, 4), (16, 128, 2))
"""Tiles of kernels that write no transposed copy."""

COL_TILES: tuple[Tile, ...] = ((128, 128, 8), (64, 64, 4), (32, 64, 4))
"""Tiles of kernels that write a transposed copy; 128 x 128 fills 128-byte lines of both layouts."""

GROUP = 8
"""Tiles go down this many tile rows, then to the next tile column: neighbors write long runs."""


def tiled(
    kernel: Any,
    tiles: tuple[Tile, ...],  # (rows, columns, warps), from large to small
    device: torch.device,
    integers: tuple[int, ...],  # the kernel's arguments after the tensors: R, C, ...
    constants: tuple[object, ...] = (),  # its constexprs before EVEN, BLOCK_R, BLOCK_C and GROUP
) -> Launch:
    """Return the launch of a kernel whose programs each process one tile of a matrix [R, C].

    Uses the first of ``tiles`` with two or more programs per multiprocessor, else the last. EVEN:
    they fill the matrix, so no mask is needed. GROUP: tile rows that `tile_at` goes down at a time.
    """
    (R, C, *_), sms = integers, sm_count(device)
    for tile in tiles:
        block_r, block_c, num_warps = tile  # multiples of 16, so that tiles cover the padding
        programs = -(-R // block_r) * -(-C // block_c)
        if programs >= 2 * sms:
            break
    even = R % block_r == 0 and C % block_c == 0
    constants = (*constants, even, block_r, block_c, GROUP)
    return Launch(kernel, device, programs, integers, constants, num_warps)


@jit
def reversed_tile():  # type: ignore[no-untyped-def]
    """Return this program's index, counted from the last: L2 may hold the end of the matrix."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@jit
def tile_at(  # type: ignore[no-untyped-def]
    tile, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr
):
    """Return the tile row and tile column of the tile number ``tile`` in a matrix [R, C].

    Tiles are numbered down GROUP tile rows, then down the same rows of the next tile column.
    """
    tiles_r, tiles_c = tl.cdiv(R, BLOCK_R), tl.cdiv(C, BLOCK_C)
    group = tile // (GROUP * tiles_c)
    height = tl.minimum(tiles_r - group * GROUP, GROUP)
    within = tile - group * (GROUP * tiles_c)
    return group * GROUP + within % height, within // height


@jit
def load(ptrs, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load from ``ptrs``, 0 where the mask ``inside`` is False. EVEN: it is True everywhere."""
    if EVEN:
        values = tl.load(ptrs)
    else:
        values = tl.load(ptrs, mask=inside, other=0)
    return values


@jit
def or_zero(v, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``v``, 0 where the mask ``inside`` is False. EVEN: it is True everywhere."""
    if not EVEN:
        v = tl.where(inside, v, 0.0)  # no product with a mask, since v may be NaN
    return v


@jit
def store(ptrs, values, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store ``values`` at ``ptrs`` where ``inside`` is True. EVEN: the mask is True everywhere."""
    if EVEN:
        tl.store(ptrs, values)
    else:
        tl.store(ptrs, values, mask=inside)


@jit
def tile_quads(tile_r, tile_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return indices of a tile's groups of 4 rows, [BLOCK_R / 4, 1], and columns, [1, BLOCK_C]."""
    quad = (tile_r * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)).to(tl.int64)[:, None]
    c = (tile_c * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    return quad, c


@jit
def quad_rows(quad):  # type: ignore[no-untyped-def]
    """Return rows 4 * quad + (0, 1, 2, 3), as four tensors; ``quad`` has indices of row groups."""
    return quad * 4, quad * 4 + 1, quad * 4 + 2, quad * 4 + 3


@jit
def load_rows(ptr, rows, stride, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load 4 tensors at ``ptr + rows[i] * stride``, 0 where not ``inside[i]``; EVEN: no masks."""
    return [load(ptr + rows[i] * stride, inside[i], EVEN) for i in (0, 1, 2, 3)]


@jit
def largest_magnitudes(x):  # type: ignore[no-untyped-def]
    """Return the bits of the elementwise maximum of abs(x[0]), ..., abs(x[3]), as integers."""
    bits = [magnitude_bits(values) for values in x]
    return tl.maximum(tl.maximum(bits[0], bits[1]), tl.maximum(bits[2], bits[3]))


@jit
def block_max(m, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the maximum of each block of HEIGHT rows and WIDTH columns of the matrix ``m``."""
    if m.shape[1] == WIDTH:  # one block along the columns needs no reshape
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
    """Repeat each element of ``s`` as a HEIGHT x WIDTH block; dims of ``s`` of size 1 stay 1."""
    if HEIGHT != 1 and s.shape[0] != 1:
        s = tl.broadcast_to(s[:, None, :], (s.shape[0], HEIGHT, s.shape[1]))
        s = tl.reshape(s, (s.shape[0] * HEIGHT, s.shape[2]))
    if WIDTH != 1 and s.shape[1] != 1:
        s = tl.broadcast_to(s[:, :, None], (s.shape[0], s.shape[1], WIDTH))
        s = tl.reshape(s, (s.shape[0], s.shape[1] * WIDTH))
    return s


@jit
def times(v, inverse, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 4 float32 tensors ``v[i] * inverse[i]``, 0 where not ``inside[i]`` unless EVEN.

    ``inverse`` is 1 / scale. Where ``v`` is Inf, the scale, from the amax, is Inf or NaN, and the
    product Inf * (1 / Inf) is NaN. Scales that are 8-bit exponents end at 2**127: Inf stays Inf.
    """
    return [or_zero(v[i] * inverse[i], inside[i], EVEN) for i in (0, 1, 2, 3)]


@jit
def store_row_scales(ptr, quad, scales, rows):  # type: ignore[no-untyped-def]
    """Store ``scales[i]`` at index 4 * quad + i of the vector [rows] at ``ptr``, i from 0 to 3."""
    r = quad_rows(quad)
    for i in tl.static_range(4):
        tl.store(ptr + r[i], scales[i], mask=r[i] < rows)


@jit
def store_row_data(  # type: ignore[no-untyped-def]
    ptr, v, quad, c, rows, Cp, ARITHMETIC: tl.constexpr, EVEN: tl.constexpr,
    EVEN_C: tl.constexpr = False,
):  # fmt: skip
    """Round four float32 tensors ``v`` to float8; store them in the matrix [rows, Cp] at ``ptr``.

    ``v[i]`` has the rows 4 * quad + i and the columns ``c``. The format has ARITHMETIC[0] mantissa
    bits. EVEN: the tile is within the matrix; EVEN_C: its columns are. Otherwise stores are masked.
    """
    ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + c
    r = quad_rows(quad)
    for i in tl.static_range(4):
        inside = r[i] < rows
        if not EVEN_C:
            inside = inside & (c < Cp)
        store(ptr + r[i] * Cp, to_float8_bits(v[i], ARITHMETIC), inside, EVEN)


@jit
def store_col_data(ptr, words, quad, c, rows, pitch, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store ``words[i, j]`` at [c[j], quad[i]] of uint32 [rows, pitch] if inside; EVEN: all are."""
    c, quad = tl.trans(c), tl.trans(quad)
    ptr = ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + c * pitch + quad
    store(ptr, tl.trans(words), (c < rows) & (quad < pitch), EVEN)


STRIP_WARPS, STRIP_R, STRIP_BYTES, MOST_TILES = 4, 64, 256, 8
"""Warps, rows, and bytes per row of a tile, and the largest number of tiles per program."""


def strips_of(R: int, C: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int, int]:
    """Split a matrix [R, C] into strips of columns, down which programs go to measure amaxes.

    Returns the rows per program, the columns of a strip, and the number of strips. A program gets
    1 to 8 tiles of 64 rows, the more the better, but there are 8 programs per multiprocessor if the
    matrix allows: amaxes of columns take one slow atomic max per program and column.
    """
    block_c = STRIP_BYTES // dtype.itemsize
    strips = -(-C // block_c)
    tiles_per_program = -(-R // STRIP_R) * strips // (8 * sm_count(device))
    return STRIP_R * min(max(tiles_per_program, 1), MOST_TILES), block_c, strips


@jit
def measure_strip(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, C]; only rows begin:end are read
    row_amax_ptr,  # int32 [rows], raised to the bits of the amaxes of rows; if ALL, one element
    col_amax_ptr,  # int32 [columns], raised to the bits of the amaxes of columns
    begin, end, strip, C, stride_r, stride_c,  # columns are from strip * BLOCK_C on
    ROW: tl.constexpr, COL: tl.constexpr,  # measure the amaxes of rows; of columns
    ALL: tl.constexpr,  # measure the amax of all elements instead of rows and columns
    EVEN: tl.constexpr,  # strips fill the columns exactly
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Raise amaxes in memory, by atomic max, to those of rows ``begin:end`` of a column strip."""
    element: tl.constexpr = x_ptr.dtype.element_ty
    c = (strip * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)  # offsets may exceed 32 bits
    x_ptr += c[None, :] * stride_c
    largest = magnitude_bits(tl.zeros((BLOCK_R, BLOCK_C), element))
    row = begin
    while row < end:  # Triton's interpreter (3.6) takes no range of tensors
        # Rows past the end are replaced by the last row, which changes no amax.
        r = tl.minimum(row + tl.arange(0, BLOCK_R), end - 1).to(tl.int64)
        bits = magnitude_bits(load(x_ptr + r[:, None] * stride_r, c[None, :] < C, EVEN))
        if COL or ALL:
            largest = tl.maximum(largest, bits)
        if ROW:
            row_bits = float32_bits(tl.max(bits, axis=1), element)
            tl.atomic_max(row_amax_ptr + r, row_bits, sem="relaxed")
        row += BLOCK_R
    if COL:
        col_bits = float32_bits(tl.max(largest, axis=0), element)
        tl.atomic_max(col_amax_ptr + c, col_bits, mask=c < C, sem="relaxed")
    if ALL:
        bits = float32_bits(tl.max(tl.max(largest, axis=1), axis=0), element)
        tl.atomic_max(row_amax_ptr, bits, sem="relaxed")
