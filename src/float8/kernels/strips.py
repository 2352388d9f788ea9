"""The amaxes of all rows and columns of a matrix in one read, inside Triton kernels.

A program goes down a strip, one tile after the other: amaxes of programs are joined by atomics, of
which a GPU does few per second, and those of columns are due once for each strip.
"""

from torch import Tensor

from float8.kernels.amax import float32_bits, magnitude_bits
from float8.kernels.runtime.device import sm_count
from float8.kernels.runtime.launch import Slot
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import load

NUM_WARPS, BLOCK_R, ROW_BYTES = 4, 64, 256
"""Of a tile: its warps, its rows, and the bytes of each."""

MOST_TILES = 8


def strips_of(x: Slot | Tensor, R: int, C: int) -> tuple[int, int, int]:
    """Share a matrix [R, C]: rows of a program, columns of its strip, how many strips there are.

    The strips are so short that each multiprocessor has some programs, where that leaves a tile.
    """
    block_c = ROW_BYTES // x.dtype.itemsize
    strips = -(-C // block_c)
    tiles = -(-R // BLOCK_R) * strips // (8 * sm_count(x.device))
    return BLOCK_R * min(max(tiles, 1), MOST_TILES), block_c, strips


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
    BLOCK_C: tl.constexpr,
):
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
