"""The Triton kernel behind all casts."""

from float8.kernels._float8 import scale_of_amax, to_float8_bits, to_float8_words, to_float32
from float8.kernels._producers import swiglu
from float8.kernels._tiles import load, store, tile_at, tile_of_program
from float8.kernels._triton import jit, tl
from float8.kernels.amax import float32_bits, magnitude_bits


@jit(do_not_specialize_on_alignment=["scale_ptr", "parts_ptr", "scale_out_ptr", "amax_ptr"])
def _cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    y_ptr,  # [R, C], as x: the factor of silu(x) if SWIGLU
    rstd_ptr,  # [R], if RMS_NORM
    weight_ptr,  # [C], if RMS_NORM
    along_ptr,  # contiguous along C, at least [R, C]
    across_ptr,  # contiguous along R, at least [C, R]
    scale_ptr,
    parts_ptr,
    scale_out_ptr,
    amax_ptr,
    R,
    C,
    stride_r,
    stride_c,
    parts,
    PRODUCER: tl.constexpr,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    MANTISSA: tl.constexpr,
    FLOAT8_MAX: tl.constexpr,
    SOURCE: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two, not below parts
    POWER_OF_2: tl.constexpr,
    RECORD: tl.constexpr,
    REPAIR: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    if REPAIR:
        # A second launch, after one that cast with the scale at scale_ptr and left the amax in
        # parts: it only reads both. It casts again if the scale is to be another, with few
        # programs that take several tiles each.
        scale = choose_scale(scale_ptr, parts_ptr, parts, SOURCE, PARTS, FLOAT8_MAX, POWER_OF_2)
        if tl.program_id(0) == 0:
            tl.store(scale_out_ptr, scale)
            if RECORD:
                raise_to_part(amax_ptr, parts_ptr)
        if scale != tl.load(scale_ptr):  # also where it is NaN
            tiles = tl.cdiv(tl.cdiv(R, 16) * 16, BLOCK_R) * tl.cdiv(tl.cdiv(C, 16) * 16, BLOCK_C)
            tile = tl.program_id(0)
            while tile < tiles:  # Triton's interpreter (3.6) takes no range of tensors
                _cast_tile(
                    tile, x_ptr, y_ptr, rstd_ptr, weight_ptr, along_ptr, across_ptr, scale_out_ptr,
                    scale_ptr, parts_ptr, amax_ptr, R, C, stride_r, stride_c, parts, PRODUCER,
                    ALONG, ACROSS, MANTISSA, FLOAT8_MAX, SOURCE, PARTS, POWER_OF_2, False,
                    HARDWARE, EVEN, BLOCK_R, BLOCK_C, GROUP,
                )  # fmt: skip
                tile += tl.num_programs(0)
    else:
        _cast_tile(
            tile_of_program(), x_ptr, y_ptr, rstd_ptr, weight_ptr, along_ptr, across_ptr,
            scale_out_ptr, scale_ptr, parts_ptr, amax_ptr, R, C, stride_r, stride_c, parts,
            PRODUCER, ALONG, ACROSS, MANTISSA, FLOAT8_MAX, SOURCE, PARTS, POWER_OF_2, RECORD,
            HARDWARE, EVEN, BLOCK_R, BLOCK_C, GROUP,
        )  # fmt: skip


@jit
def _cast_tile(  # type: ignore[no-untyped-def]
    tile, x_ptr, y_ptr, rstd_ptr, weight_ptr, along_ptr, across_ptr, scale_out_ptr,
    scale_ptr, parts_ptr, amax_ptr, R, C, stride_r, stride_c, parts, PRODUCER: tl.constexpr,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, MANTISSA: tl.constexpr, FLOAT8_MAX: tl.constexpr,
    SOURCE: tl.constexpr, PARTS: tl.constexpr, POWER_OF_2: tl.constexpr, RECORD: tl.constexpr,
    HARDWARE: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Cast one tile, by its number."""
    Rp = tl.cdiv(R, 16) * 16
    Cp = tl.cdiv(C, 16) * 16
    tile_r, tile_c = tile_at(tile, Rp, Cp, BLOCK_R, BLOCK_C, GROUP)
    # The tile as four tiles of every fourth row: see _tiles. 64-bit, so that offsets are.
    quad = (tile_r * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)).to(tl.int64)[:, None]
    c = (tile_c * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    r0, r1, r2, r3 = quad * 4, quad * 4 + 1, quad * 4 + 2, quad * 4 + 3
    in_c = c < C
    in0, in1, in2, in3 = (r0 < R) & in_c, (r1 < R) & in_c, (r2 < R) & in_c, (r3 < R) & in_c
    x_ptr += c * stride_c
    x0 = load(x_ptr + r0 * stride_r, in0, EVEN)
    x1 = load(x_ptr + r1 * stride_r, in1, EVEN)
    x2 = load(x_ptr + r2 * stride_r, in2, EVEN)
    x3 = load(x_ptr + r3 * stride_r, in3, EVEN)
    v0, v1, v2, v3 = (
        to_float32(x0, HARDWARE),
        to_float32(x1, HARDWARE),
        to_float32(x2, HARDWARE),
        to_float32(x3, HARDWARE),
    )
    if PRODUCER == 1:
        y_ptr += c * stride_c
        v0 = swiglu(v0, to_float32(load(y_ptr + r0 * stride_r, in0, EVEN), HARDWARE))
        v1 = swiglu(v1, to_float32(load(y_ptr + r1 * stride_r, in1, EVEN), HARDWARE))
        v2 = swiglu(v2, to_float32(load(y_ptr + r2 * stride_r, in2, EVEN), HARDWARE))
        v3 = swiglu(v3, to_float32(load(y_ptr + r3 * stride_r, in3, EVEN), HARDWARE))
    elif PRODUCER == 2:
        weight = to_float32(load(weight_ptr + c, in_c, EVEN), HARDWARE)
        v0 = v0 * load(rstd_ptr + r0, r0 < R, EVEN) * weight
        v1 = v1 * load(rstd_ptr + r1, r1 < R, EVEN) * weight
        v2 = v2 * load(rstd_ptr + r2, r2 < R, EVEN) * weight
        v3 = v3 * load(rstd_ptr + r3, r3 < R, EVEN) * weight

    scale = choose_scale(scale_ptr, parts_ptr, parts, SOURCE, PARTS, FLOAT8_MAX, POWER_OF_2)
    if SOURCE != 0:
        if tl.program_id(0) == 0:
            tl.store(scale_out_ptr, scale)
    if RECORD:
        if PRODUCER == 0:  # in 16 bits, not in 32
            record_amax(amax_ptr, x0, x1, x2, x3)
        else:
            record_amax(amax_ptr, v0, v1, v2, v3)

    inverse = tl.div_rn(1.0, scale)
    v0 = scaled(v0, in0, inverse, EVEN)
    v1 = scaled(v1, in1, inverse, EVEN)
    v2 = scaled(v2, in2, inverse, EVEN)
    v3 = scaled(v3, in3, inverse, EVEN)
    if ALONG != 0:
        rows = R if ALONG == 1 else Rp
        store_along(along_ptr, v0, v1, v2, v3, quad, c, rows, Cp, MANTISSA, HARDWARE, EVEN)
    if ACROSS != 0:
        rows = C if ACROSS == 1 else Cp
        store_across(across_ptr, v0, v1, v2, v3, quad, c, rows, Rp, MANTISSA, HARDWARE, EVEN)


@jit
def choose_scale(  # type: ignore[no-untyped-def]
    scale_ptr,
    parts_ptr,
    parts,
    SOURCE: tl.constexpr,
    PARTS: tl.constexpr,
    FLOAT8_MAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
):
    """The decode scale, from where ``SOURCE`` says; see ``_cast_launch``."""
    if SOURCE == 1:
        scale = _measured_scale(parts_ptr, parts, PARTS, FLOAT8_MAX, POWER_OF_2)
    else:
        scale = tl.load(scale_ptr)
        if SOURCE == 2:
            if scale == 0.0:
                scale = _measured_scale(parts_ptr, parts, PARTS, FLOAT8_MAX, POWER_OF_2)
        elif SOURCE == 3:
            # The larger one; in this order, so that a NaN among the amaxes counts as larger.
            own = _measured_scale(parts_ptr, parts, PARTS, FLOAT8_MAX, POWER_OF_2)
            scale = tl.where(own <= scale, scale, own)
    return scale


@jit
def _measured_scale(  # type: ignore[no-untyped-def]
    parts_ptr, parts, PARTS: tl.constexpr, FLOAT8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr
):
    at = tl.arange(0, PARTS)
    parts_ptr = parts_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    bits = tl.max(tl.load(parts_ptr + at, mask=at < parts, other=0))
    return scale_of_amax(bits, FLOAT8_MAX, POWER_OF_2)


@jit
def record_amax(amax_ptr, x0, x1, x2, x3):  # type: ignore[no-untyped-def]
    """Raise the float32 at ``amax_ptr`` to the largest magnitude of four tiles."""
    bits = tl.maximum(
        tl.maximum(magnitude_bits(x0), magnitude_bits(x1)),
        tl.maximum(magnitude_bits(x2), magnitude_bits(x3)),
    )
    amax_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    bits = float32_bits(tl.max(tl.max(bits, axis=1), axis=0), x0.dtype)
    # Thousands of programs would queue up for one address, and few of them have news.
    if bits > tl.load(amax_ptr, volatile=True):
        tl.atomic_max(amax_ptr, bits, sem="relaxed")


@jit
def raise_to_part(amax_ptr, part_ptr):  # type: ignore[no-untyped-def]
    """Raise the float32 at ``amax_ptr`` to the magnitude at ``part_ptr``."""
    bits = tl.load(part_ptr.to(tl.pointer_type(tl.int32), bitcast=True))
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@jit
def scaled(v, inside, inverse, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """``v`` times ``inverse``, float32; zero where not ``inside``."""
    # An Inf in v must become NaN, though a product that overflows saturates. Inf * 0 is NaN, and
    # to add a zero of the product's own sign changes nothing else, contracted to an FMA or not.
    zero = (inverse.to(tl.int32, bitcast=True) & -0x80000000).to(tl.float32, bitcast=True)
    v = v * inverse + v * zero
    if not EVEN:
        v = tl.where(inside, v, 0.0)  # also where the scale is zero: 0 * Inf
    return v


@jit
def store_along(  # type: ignore[no-untyped-def]
    ptr, v0, v1, v2, v3, quad, c, rows, Cp, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Store float32 values of every fourth row as float8 rows [rows, Cp]."""
    in_cp = c < Cp
    ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + c
    r0, r1, r2, r3 = quad * 4, quad * 4 + 1, quad * 4 + 2, quad * 4 + 3
    store(ptr + r0 * Cp, to_float8_bits(v0, MANTISSA, HARDWARE), (r0 < rows) & in_cp, EVEN)
    store(ptr + r1 * Cp, to_float8_bits(v1, MANTISSA, HARDWARE), (r1 < rows) & in_cp, EVEN)
    store(ptr + r2 * Cp, to_float8_bits(v2, MANTISSA, HARDWARE), (r2 < rows) & in_cp, EVEN)
    store(ptr + r3 * Cp, to_float8_bits(v3, MANTISSA, HARDWARE), (r3 < rows) & in_cp, EVEN)


@jit
def store_across(  # type: ignore[no-untyped-def]
    ptr, v0, v1, v2, v3, quad, c, rows, Rp, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Store float32 values of every fourth row transposed, as float8 [rows, Rp]."""
    c, quad = tl.trans(c), tl.trans(quad)
    ptr = ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + quad
    words = tl.trans(to_float8_words(v0, v1, v2, v3, MANTISSA, HARDWARE))
    store(ptr + c * (Rp // 4), words, (c < rows) & (quad < Rp // 4), EVEN)
