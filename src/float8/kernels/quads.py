"""A tile of a matrix as four tiles, of every fourth row each.

Kernels that write a transposed 1-byte copy hold a tile so. The bytes that come to lie next to each
other in the copy are in the same place of the four tiles: packed into 32-bit words, they go
through shared memory as words, four times fewer items than bytes.

``quad`` [BLOCK_R / 4, 1] numbers groups of four rows, ``c`` [1, BLOCK_C] the columns; both are
64-bit, so that offsets are. What is called four below is a tuple: of each group the first rows,
the second, the third and the fourth, [BLOCK_R / 4, BLOCK_C].
"""

from float8.kernels.amax import float32_bits, magnitude_bits
from float8.kernels.numeric import (
    reciprocal,
    rounded_to_bfloat16,
    scale_of_amax,
    to_float8_bits,
    to_float8_words,
    to_float32,
)
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import load, or_zero, store


@jit
def quads_of(tile_r, tile_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``quad`` and ``c`` of the tile of this row and column, counted in tiles."""
    quad = (tile_r * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)).to(tl.int64)[:, None]
    c = (tile_c * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    return quad, c


@jit
def rows_of(quad):  # type: ignore[no-untyped-def]
    """Number the rows, four [BLOCK_R / 4, 1]."""
    return quad * 4, quad * 4 + 1, quad * 4 + 2, quad * 4 + 3


@jit
def inside_of(quad, c, R, C):  # type: ignore[no-untyped-def]
    """Say where the matrix [R, C] is: four masks."""
    r0, r1, r2, r3 = rows_of(quad)
    in_c = c < C
    return (r0 < R) & in_c, (r1 < R) & in_c, (r2 < R) & in_c, (r3 < R) & in_c


@jit
def load_rows(ptr, quad, stride, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load four; ``ptr`` [1, BLOCK_C] is where the columns of row 0 lie."""
    r0, r1, r2, r3 = rows_of(quad)
    x0 = load(ptr + r0 * stride, inside[0], EVEN)
    x1 = load(ptr + r1 * stride, inside[1], EVEN)
    x2 = load(ptr + r2 * stride, inside[2], EVEN)
    x3 = load(ptr + r3 * stride, inside[3], EVEN)
    return x0, x1, x2, x3


@jit
def to_float32s(x, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply `to_float32` to four."""
    return (
        to_float32(x[0], HARDWARE),
        to_float32(x[1], HARDWARE),
        to_float32(x[2], HARDWARE),
        to_float32(x[3], HARDWARE),
    )


@jit
def in_bfloat16(v, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply `rounded_to_bfloat16` to four."""
    return (
        rounded_to_bfloat16(v[0], HARDWARE),
        rounded_to_bfloat16(v[1], HARDWARE),
        rounded_to_bfloat16(v[2], HARDWARE),
        rounded_to_bfloat16(v[3], HARDWARE),
    )


@jit
def largest_of(m):  # type: ignore[no-untyped-def]
    """Return the largest in each place of four magnitudes, given as bits."""
    return tl.maximum(tl.maximum(m[0], m[1]), tl.maximum(m[2], m[3]))


@jit
def magnitudes(x):  # type: ignore[no-untyped-def]
    """Apply `magnitude_bits` to four."""
    return magnitude_bits(x[0]), magnitude_bits(x[1]), magnitude_bits(x[2]), magnitude_bits(x[3])


@jit
def record_amax(amax_ptr, x):  # type: ignore[no-untyped-def]
    """Raise the float32 at ``amax_ptr`` to the largest magnitude of four."""
    bits = largest_of(magnitudes(x))
    amax_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    bits = float32_bits(tl.max(tl.max(bits, axis=1), axis=0), x[0].dtype)
    # Thousands of programs would queue up for one address, and few of them have news.
    if bits > tl.load(amax_ptr, volatile=True):
        tl.atomic_max(amax_ptr, bits, sem="relaxed")


@jit
def scaled(v, inside, inverse, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply four float32 by ``inverse``; zero where not ``inside``."""
    # An Inf in v must become NaN, though a product that overflows saturates. Inf * 0 is NaN, and
    # to add a zero of the product's own sign changes nothing else, contracted to an FMA or not.
    zero = (inverse.to(tl.int32, bitcast=True) & -0x80000000).to(tl.float32, bitcast=True)
    return (
        or_zero(v[0] * inverse + v[0] * zero, inside[0], EVEN),
        or_zero(v[1] * inverse + v[1] * zero, inside[1], EVEN),
        or_zero(v[2] * inverse + v[2] * zero, inside[2], EVEN),
        or_zero(v[3] * inverse + v[3] * zero, inside[3], EVEN),
    )


@jit
def times_inverse(v, inside, inverse, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply four float32 by the reciprocal of the scale of an amax that covers all of them."""
    return times_inverses(v, inside, (inverse, inverse, inverse, inverse), EVEN)


@jit
def times_inverses(v, inside, inverse, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply four float32 by reciprocals of scales, each of an amax that covers its factor."""
    # Unlike in `scaled`, an Inf in v becomes NaN by itself: its scale is Inf or NaN.
    return (
        or_zero(v[0] * inverse[0], inside[0], EVEN),
        or_zero(v[1] * inverse[1], inside[1], EVEN),
        or_zero(v[2] * inverse[2], inside[2], EVEN),
        or_zero(v[3] * inverse[3], inside[3], EVEN),
    )


@jit
def scales_of(m, MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply `scale_of_amax` to four amaxes."""
    return (
        scale_of_amax(m[0], MANTISSA, POWER_OF_2, HARDWARE),
        scale_of_amax(m[1], MANTISSA, POWER_OF_2, HARDWARE),
        scale_of_amax(m[2], MANTISSA, POWER_OF_2, HARDWARE),
        scale_of_amax(m[3], MANTISSA, POWER_OF_2, HARDWARE),
    )


@jit
def reciprocals(s, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply `reciprocal` to four scales."""
    return (
        reciprocal(s[0], HARDWARE),
        reciprocal(s[1], HARDWARE),
        reciprocal(s[2], HARDWARE),
        reciprocal(s[3], HARDWARE),
    )


@jit
def store_scales(ptr, quad, s, rows):  # type: ignore[no-untyped-def]
    """Store the scales [BLOCK_R / 4, 1] of four rows each, to a vector of so many ``rows``."""
    r0, r1, r2, r3 = rows_of(quad)
    tl.store(ptr + r0, s[0], mask=r0 < rows)
    tl.store(ptr + r1, s[1], mask=r1 < rows)
    tl.store(ptr + r2, s[2], mask=r2 < rows)
    tl.store(ptr + r3, s[3], mask=r3 < rows)


@jit
def store_along(  # type: ignore[no-untyped-def]
    ptr, v, quad, c, rows, Cp, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr,
    EVEN_C: tl.constexpr = False,
):  # fmt: skip
    """Store four float32 as float8 [rows, Cp]; ``EVEN_C``: tiles fill the columns, not the rows."""
    ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + c
    r0, r1, r2, r3 = rows_of(quad)
    i0, i1, i2, i3 = r0 < rows, r1 < rows, r2 < rows, r3 < rows
    if not EVEN_C:
        in_cp = c < Cp
        i0, i1, i2, i3 = i0 & in_cp, i1 & in_cp, i2 & in_cp, i3 & in_cp
    store(ptr + r0 * Cp, to_float8_bits(v[0], MANTISSA, HARDWARE), i0, EVEN)
    store(ptr + r1 * Cp, to_float8_bits(v[1], MANTISSA, HARDWARE), i1, EVEN)
    store(ptr + r2 * Cp, to_float8_bits(v[2], MANTISSA, HARDWARE), i2, EVEN)
    store(ptr + r3 * Cp, to_float8_bits(v[3], MANTISSA, HARDWARE), i3, EVEN)


@jit
def store_across(  # type: ignore[no-untyped-def]
    ptr, v, quad, c, rows, Rp, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, EVEN: tl.constexpr
):
    """Store four float32 transposed, as float8 [rows, Rp]."""
    c, quad = tl.trans(c), tl.trans(quad)
    ptr = ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + quad
    words = tl.trans(to_float8_words(v[0], v[1], v[2], v[3], MANTISSA, HARDWARE))
    store(ptr + c * (Rp // 4), words, (c < rows) & (quad < Rp // 4), EVEN)
