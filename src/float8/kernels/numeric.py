"""Arithmetic inside Triton kernels: magnitudes, scales, and the conversion of float32 to float8.

Kernels take no floating-point minimum or maximum: some Triton versions miscompile a transposed
1-byte store next to min.NaN/max.NaN (triton issue 11111), and a clamp written with ``tl.where``
compiles to these instructions. The bits of magnitudes compare as integers like the floats do, and
NaN lies above Inf, so that an integer maximum propagates NaN.

The constant ``ARITHMETIC`` describes a cast by three values: the mantissa bits of the format (3 of
e4m3fn, 2 of e5m2); how scales are rounded (0: not, 1: up to 2**n, 2: up to 8-bit exponents); and
``HARDWARE``, whether the GPU converts to float8, see ``has_float8_conversion``.
"""

from float8.kernels.runtime.triton import jit, tl

MANTISSA_BITS, SCALE_ROUNDING, HARDWARE_CAST = map(tl.constexpr, range(3))
"""Indices into ``ARITHMETIC``."""


@jit
def magnitude_bits(x):  # type: ignore[no-untyped-def]
    """Return the bits of abs(x), as int16 if x has a 16-bit dtype and int32 if x is float32."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    return bits


@jit
def float32_bits(bits, element: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float32 bits of abs(x) as int32, given its ``bits`` in the dtype ``element``."""
    bits = bits.to(tl.int32)
    if element == tl.bfloat16:
        bits = bits << 16
    elif element == tl.float16:
        half = bits.to(tl.int16).to(tl.float16, bitcast=True)
        bits = half.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@jit
def to_float32(x, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert to float32, exactly; bfloat16 by a shift if not HARDWARE (GPU converts to float8)."""
    if HARDWARE or x.dtype != tl.bfloat16:
        v = x.to(tl.float32)
    else:
        # Triton's interpreter (3.6) gets subnormal bfloat16 wrong.
        v = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return v


@jit
def rounded_to_bfloat16(v, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round float32 to bfloat16 and back; by integers unless HARDWARE (the GPU casts to float8)."""
    if HARDWARE:
        v = v.to(tl.bfloat16).to(tl.float32)
    else:
        bits = v.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        v = tl.where(v == v, bits.to(tl.float32, bitcast=True), v)
    return v


@jit
def scale_of_amax(bits, ARITHMETIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the decode scale max(amax, 2**-100) / max(format), given the float32 bits of an amax.

    The format has ``ARITHMETIC[0]`` mantissa bits (3: e4m3, 2: e5m2). The scale is rounded to
    float32, correctly, then up to a power of two unless ``ARITHMETIC[1]`` is 0. If
    ``ARITHMETIC[2]``, on recent GPUs, FMAs replace the division, which takes twice the registers.
    """
    FLOAT8_MAX: tl.constexpr = 448.0 if ARITHMETIC[MANTISSA_BITS] == 3 else 57344.0
    floor: tl.constexpr = (127 - 100) << 23  # SMALLEST_AMAX; NaN and Inf lie above it
    amax = tl.maximum(bits, floor).to(tl.float32, bitcast=True)
    if ARITHMETIC[HARDWARE_CAST]:
        # An approximation and its residual (Markstein 1990). Exact for every mantissa and both
        # formats; no intermediate value is subnormal.
        INVERSE: tl.constexpr = 1.0 / FLOAT8_MAX
        guess = amax * INVERSE
        scale = tl.fma(tl.fma(-guess, FLOAT8_MAX, amax), INVERSE, guess)
        scale = tl.where(bits < 0x7F800000, scale, amax)  # Inf and NaN stay
    else:
        scale = tl.div_rn(amax, FLOAT8_MAX)
    if ARITHMETIC[SCALE_ROUNDING]:  # up to a power of two, as in `amax_to_scale`
        bits = scale.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, rounded, scale)  # NaN stays
    return scale


@jit
def reciprocal(scale, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 1 / scale, rounded correctly for scales of `scale_of_amax`; HARDWARE: by PTX, FMAs."""
    if HARDWARE:
        # What a division compiles to, but without its slow path, which no scale needs.
        guess = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.fma(tl.fma(-scale, guess, 1.0), guess, guess)
        inverse = tl.fma(tl.fma(-scale, inverse, 1.0), inverse, inverse)
        inverse = tl.where(inverse == inverse, inverse, guess)  # the scale is Inf
    else:
        inverse = tl.div_rn(1.0, scale)
    return inverse


@jit
def scale_and_inverse(bits, ARITHMETIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (scale, 1 / scale) as float32 for the amaxes whose float32 bits are ``bits``.

    ARITHMETIC: mantissa bits of the format (3: e4m3, 2: e5m2); rounding of scales (0: none, 1: up
    to 2**n, 2: to MXFP8's exponents, where 1 / 2**-127 counts as 1); True if the GPU converts to
    float8, so that FMAs may replace divisions.
    """
    if ARITHMETIC[SCALE_ROUNDING] == 2:  # scales are 8-bit exponents
        # The largest value of a format is 1.75 * 2**BIAS: a mantissa above 1.75 rounds up.
        BIAS: tl.constexpr = 8 if ARITHMETIC[MANTISSA_BITS] == 3 else 15
        exponent = ((bits + 0x1FFFFF) & 0x7F800000) - (BIAS << 23)
        tiny, infinite, nan = exponent <= 0, bits >= 0x7F800000, bits > 0x7F800000
        scale = tl.where(tiny, 0x00400000, exponent)  # 2**-127; 0x7F000000 is 2**127
        scale = tl.where(nan, 0x7FC00000, tl.where(infinite, 0x7F000000, scale))
        # Computed from the scale: threads with many scales then need fewer registers.
        inverse = tl.where(scale == 0x7F000000, 0x00400000, 0x7F000000 - scale)
        inverse = tl.where(scale == 0x00400000, 0x3F800000, inverse)  # 1: all values round to 0
        inverse = tl.where(nan, scale, inverse)
        scale = scale.to(tl.float32, bitcast=True)
        inverse = inverse.to(tl.float32, bitcast=True)
    else:
        scale = scale_of_amax(bits, ARITHMETIC)
        inverse = reciprocal(scale, ARITHMETIC[HARDWARE_CAST])
    return scale, inverse


@jit
def to_float8_bits(v, ARITHMETIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round float32 to float8 as uint8; ARITHMETIC[0]: mantissa bits. Inf saturates; NaN: 0x7f."""
    if ARITHMETIC[HARDWARE_CAST]:
        FORMAT: tl.constexpr = tl.float8e4nv if ARITHMETIC[MANTISSA_BITS] == 3 else tl.float8e5
        codes = v.to(FORMAT).to(tl.uint8, bitcast=True)
    else:
        codes = _round_to_float8_bits(v, ARITHMETIC[MANTISSA_BITS])
    return codes


@jit
def pack_words(b0, b1, b2, b3):  # type: ignore[no-untyped-def]
    """Pack four uint8 tensors into one uint32 tensor, ``b0`` into the lowest byte."""
    low = b0.to(tl.uint32) | (b1.to(tl.uint32) << 8)
    high = (b2.to(tl.uint32) << 16) | (b3.to(tl.uint32) << 24)
    return low | high


@jit
def to_float8_words(v, ARITHMETIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round four float32 tensors ``v`` to float8, and pack four bytes, one of each, into a uint32.

    ``v[0]`` gives the lowest. ARITHMETIC[0]: mantissa bits; [2]: use PTX, as ptxas 12.8 miscompiles
    bytes packed with shifts: three of four are garbage (on H100 with Triton 3.6, unmasked kernels).
    """
    if ARITHMETIC[HARDWARE_CAST]:
        PAIR: tl.constexpr = "e4m3x2" if ARITHMETIC[MANTISSA_BITS] == 3 else "e5m2x2"
        ASM: tl.constexpr = f"""{{
            .reg .b16 low, high;
            cvt.rn.satfinite.{PAIR}.f32 low, $2, $1;
            cvt.rn.satfinite.{PAIR}.f32 high, $4, $3;
            mov.b32 $0, {{low, high}};
        }}"""
        words = tl.inline_asm_elementwise(
            ASM, "=r,f,f,f,f", [v[0], v[1], v[2], v[3]], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        b = [_round_to_float8_bits(values, ARITHMETIC[MANTISSA_BITS]) for values in v]
        words = pack_words(b[0], b[1], b[2], b[3])
    return words


@jit
def _round_to_float8_bits(v, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round float32 to float8 bits (uint8) with MANTISSA mantissa bits, by integer arithmetic."""
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    LARGEST: tl.constexpr = 0x43E00000 if MANTISSA == 3 else 0x47600000  # 448, 57344
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = v.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    is_nan = bits > 0x7F800000
    bits = tl.minimum(bits, LARGEST)
    # Normal results: round off SHIFT bits to nearest even, then change the exponent's bias. A carry
    # out of the mantissa correctly increments the exponent.
    normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << MANTISSA
    # Subnormal results: adding a number whose last bit is worth the smallest subnormal makes the
    # hardware round to a multiple of that subnormal.
    ANCHOR: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    anchor = tl.full(bits.shape, ANCHOR, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (bits.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - ANCHOR
    is_subnormal = bits < ((128 - BIAS) << 23)  # below 2**(1 - BIAS), the smallest normal number
    codes = tl.where(is_subnormal, subnormal, normal) | sign
    return tl.where(is_nan, 0x7F, codes).to(tl.uint8)
