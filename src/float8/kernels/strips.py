"""The amaxes of all rows and columns of a matrix in one read, inside Triton kernels.

A program goes down a strip of columns, as far as a multiprocessor's share of the matrix reaches:
amaxes are joined by atomics, of which a GPU does so few per second that small tiles would wait for
them. A warp reads rows of its own: the largest of a row is found within a warp, and those of
columns stay in registers to the end of the strip.
"""

from float8.kernels.amax import float32_bits, magnitude_bits
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import load

NUM_WARPS = 16

BLOCK_R = 32
"""Rows that a program reads at a time, two by each warp."""


def strips_of(R: int, C: int, itemsize: int, sms: int) -> tuple[int, int, int]:
    """Share a matrix [R, C] among ``sms`` multiprocessors: (rows, chunk, strips).

    Each program takes so many rows of one of so many strips, each of two chunks of so many columns:
    16 bytes for each thread of a warp.
    """
    chunk = 512 // itemsize
    strips = -(-C // (2 * chunk))
    rows = -(-R * strips // sms)
    return -(-rows // BLOCK_R) * BLOCK_R, chunk, strips


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
    c0 = (strip * (2 * BLOCK_C) + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    c1 = c0 + BLOCK_C
    m0 = magnitude_bits(tl.zeros((BLOCK_R, BLOCK_C), element))
    m1, row = m0, begin
    while row < end:  # Triton's interpreter (3.6) takes no range of tensors
        # The last row again where there are no more: that raises nothing.
        r = tl.minimum(row + tl.arange(0, BLOCK_R), end - 1).to(tl.int64)[:, None]
        at = x_ptr + r * stride_r
        b0 = magnitude_bits(load(at + c0 * stride_c, c0 < C, EVEN))
        b1 = magnitude_bits(load(at + c1 * stride_c, c1 < C, EVEN))
        if OF_ROWS:
            largest = float32_bits(tl.max(tl.maximum(b0, b1), axis=1, keep_dims=True), element)
            tl.atomic_max(of_row_ptr + r, largest, sem="relaxed")
        if OF_COLUMNS or OF_ALL:
            m0, m1 = tl.maximum(m0, b0), tl.maximum(m1, b1)
        row += BLOCK_R
    if OF_COLUMNS:
        of0 = float32_bits(tl.max(m0, axis=0, keep_dims=True), element)
        of1 = float32_bits(tl.max(m1, axis=0, keep_dims=True), element)
        tl.atomic_max(of_column_ptr + c0, of0, mask=c0 < C, sem="relaxed")
        tl.atomic_max(of_column_ptr + c1, of1, mask=c1 < C, sem="relaxed")
    if OF_ALL:
        largest = tl.max(tl.max(tl.maximum(m0, m1), axis=1), axis=0)
        tl.atomic_max(of_row_ptr, float32_bits(largest, element), sem="relaxed")
