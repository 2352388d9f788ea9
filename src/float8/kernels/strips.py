"""The amaxes of all rows and columns of a matrix in one read, inside Triton kernels.

A program goes down a strip of columns. Each warp reads rows of its own, many columns of each: so
the largest of a row is found within a warp, and those of columns stay in registers to the end of
the strip. That takes a third of the instructions of one tile after the other, without which casts
would wait for the multiprocessors of an H200 and not for its memory.
"""

from float8.kernels.amax import float32_bits, magnitude_bits
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import load

NUM_WARPS = 4

BLOCK_R = 4
"""Rows that a program reads at a time, one by each warp."""

CHUNK_BYTES = 512
"""Of a row, that a warp reads at a time: 16 by each thread. A strip is four chunks wide."""


@jit
def measure_strip(  # type: ignore[no-untyped-def]
    x_ptr,  # the matrix: where row 0 lies
    of_row_ptr,  # int32 of row 0: is raised to the bits of the amaxes of rows; or that of all
    of_column_ptr,  # int32 of column 0: the same of columns
    begin,
    end,
    strip,
    C,
    stride_r,
    stride_c,
    OF_ROWS: tl.constexpr,
    OF_COLUMNS: tl.constexpr,
    OF_ALL: tl.constexpr,  # neither of both, but the largest of all
    EVEN: tl.constexpr,  # strips fill the columns exactly
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,  # columns of a chunk
):
    """Measure the rows from ``begin`` to ``end``, in the columns of this strip."""
    element: tl.constexpr = x_ptr.dtype.element_ty
    # 64-bit, so that offsets are.
    c0 = (strip * (4 * BLOCK_C) + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    c1, c2, c3 = c0 + BLOCK_C, c0 + 2 * BLOCK_C, c0 + 3 * BLOCK_C
    m0 = magnitude_bits(tl.zeros((BLOCK_R, BLOCK_C), element))
    m1, m2, m3 = m0, m0, m0
    row = begin
    while row < end:  # Triton's interpreter (3.6) takes no range of tensors
        # The last row again where there are no more: that raises nothing.
        r = tl.minimum(row + tl.arange(0, BLOCK_R), end - 1).to(tl.int64)[:, None]
        at = x_ptr + r * stride_r
        b0 = magnitude_bits(load(at + c0 * stride_c, c0 < C, EVEN))
        b1 = magnitude_bits(load(at + c1 * stride_c, c1 < C, EVEN))
        b2 = magnitude_bits(load(at + c2 * stride_c, c2 < C, EVEN))
        b3 = magnitude_bits(load(at + c3 * stride_c, c3 < C, EVEN))
        if OF_ROWS:
            largest = tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3))
            largest = tl.max(float32_bits(largest, element), axis=1, keep_dims=True)
            tl.atomic_max(of_row_ptr + r, largest, sem="relaxed")
        if OF_COLUMNS or OF_ALL:
            m0, m1 = tl.maximum(m0, b0), tl.maximum(m1, b1)
            m2, m3 = tl.maximum(m2, b2), tl.maximum(m3, b3)
        row += BLOCK_R
    if OF_COLUMNS:
        _raise_columns(of_column_ptr, m0, c0, C, element)
        _raise_columns(of_column_ptr, m1, c1, C, element)
        _raise_columns(of_column_ptr, m2, c2, C, element)
        _raise_columns(of_column_ptr, m3, c3, C, element)
    if OF_ALL:
        largest = tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3))
        largest = float32_bits(tl.max(tl.max(largest, axis=1), axis=0), element)
        tl.atomic_max(of_row_ptr, largest, sem="relaxed")


@jit
def _raise_columns(of_column_ptr, bits, c, C, element: tl.constexpr):  # type: ignore[no-untyped-def]
    largest = tl.max(float32_bits(bits, element), axis=0, keep_dims=True)
    tl.atomic_max(of_column_ptr + c, largest, mask=c < C, sem="relaxed")
