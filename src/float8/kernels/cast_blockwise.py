"""High precision -> float8 under one scale per run of 128 elements, or per square of 128 x 128.

One kernel reads each element once: a program takes a tile of 128 x 128, which knows all its scales.
The way in is `cast_finer`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import ScalingGranularity
from float8.kernels import quads
from float8.kernels.amax import float32_bits
from float8.kernels.cast import cast_blocks
from float8.kernels.cast_kernel import layouts, mantissa, reads_along_rows
from float8.kernels.numeric import reciprocal, scale_of_amax
from float8.kernels.runtime.device import has_float8_conversion
from float8.kernels.runtime.launch import Program, Slot, empty, planned
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import tile_at, tile_of_program, tiled

_BLOCKS = ScalingGranularity.BLOCK_1x128, ScalingGranularity.BLOCK_128x128


def cast_blockwise_reference(
    x: Tensor,
    dtype: torch.dtype,
    width: int,
    square: bool,
    row: bool,
    col: bool,
    power_of_2: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Plain-torch twin: row data and scales, column data and scales, those asked for."""
    R, C = x.shape
    tall, wide = -(-R // width), -(-C // width)
    high, broad = tall * width, wide * width
    out = []
    if square:
        blocks = (tall, width, wide, width)
        # Of runs first: that fuses into what produces x.
        data, scale = cast_blocks(x, dtype, power_of_2, (high, broad), blocks, 3, 1)
        if row:
            out += [data, _pad_to_4(scale)]
        if col:
            out += [torch.ops.float8.transpose.default(data, None), _pad_to_4(scale.t())]
        return out
    Rp, Cp = (R + 15) // 16 * 16, (C + 15) // 16 * 16  # `ceil16`, without calls in eager mode
    if row:
        data, scale = cast_blocks(x, dtype, power_of_2, (Rp, broad), (Rp, wide, width), 2)
        out += [data, scale.t().clone(memory_format=torch.contiguous_format).t()]
    if col:
        data, scale = cast_blocks(x, dtype, power_of_2, (high, Cp), (tall, width, Cp), 1)
        out += [torch.ops.float8.transpose.default(data, None), scale.t()]
    return out


def _pad_to_4(scale: Tensor) -> Tensor:
    """Pad the second dim of the scales of squares with zeros; contiguous."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------- Triton


def cast_blockwise_triton(x: Tensor, *how: Any, after: Any = None) -> list[Tensor]:
    """Triton code of the op, which takes what its twin takes; `after` by its name, or last."""
    return _program(x, *how[:6])(x)  # all but `after`


@planned
def _program(x: Slot, *wanted: Any) -> Program:
    dtype, width, square, row, col, power_of_2 = wanted
    if width != 128:
        raise ValueError(f"cast_blockwise: got blocks of {width}, expected 128: there is no kernel")
    (R, C), (stride_r, stride_c) = x.shape, x.strides
    parts = layouts(x.shape, dtype, row, col, of=_BLOCKS[square])
    along, across = parts[:2], parts[2:]
    if R * C == 0:
        return Program([x], parts, [])
    makes = row, col
    if not reads_along_rows(x.strides):  # the kernel reads x.t()
        R, C, stride_r, stride_c = C, R, stride_c, stride_r
        along, across, makes = across, along, (col, row)
    hardware = has_float8_conversion(x.device)
    constants = (square, *makes, mantissa(dtype), power_of_2, hardware)
    # Scales of columns take more registers: fewer, larger threads, which masks would overfill.
    large = col and not square and R % 128 == C % 128 == 0
    tiles = ((128, 128, 4 if large else 8),)
    slots, integers = (x, *along, *across), (R, C, stride_r, stride_c)
    launch = tiled(_cast_blockwise_kernel, tiles, x.device, slots, integers, constants)
    return Program([x], parts, [launch])


@jit
def _cast_blockwise_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    along_ptr,  # [Rp, tiles of C * 128]; Rp is R padded to 16, if SQUARE to 128
    along_scale_ptr,  # [tiles of C, Rp], if SQUARE [tiles of R, tiles of C padded to 4]
    across_ptr,  # [Cp, tiles of R * 128]; Cp is C padded to 16, if SQUARE to 128
    across_scale_ptr,  # [tiles of R, Cp], if SQUARE [tiles of C, tiles of R padded to 4]
    R,
    C,
    stride_r,
    stride_c,
    SQUARE: tl.constexpr,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,  # 128, as BLOCK_C
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    PAD: tl.constexpr = 128 if SQUARE else 16
    Rp, Cp = tl.cdiv(R, PAD) * PAD, tl.cdiv(C, PAD) * PAD
    tiles_r, tiles_c = tl.cdiv(R, 128), tl.cdiv(C, 128)
    tile_r, tile_c = tile_at(tile_of_program(), R, C, 128, 128, GROUP)
    quad, c = quads.quads_of(tile_r, tile_c, 128, 128)
    inside = quads.inside_of(quad, c, R, C)
    x = quads.load_rows(x_ptr + c * stride_c, quad, stride_r, inside, EVEN)
    v = quads.to_float32s(x, HARDWARE)
    m = quads.magnitudes(x)
    largest = quads.largest_of(m)
    element: tl.constexpr = x[0].dtype
    if SQUARE:
        amax = float32_bits(tl.max(tl.max(largest, axis=1), axis=0), element)
        scale = scale_of_amax(amax, MANTISSA, POWER_OF_2, HARDWARE)
        w = quads.times_inverse(v, inside, reciprocal(scale, HARDWARE), EVEN)
        if ALONG:
            store_square(along_scale_ptr, scale, tile_r, tile_c, tiles_c)
            quads.store_along(along_ptr, w, quad, c, Rp, tiles_c * 128, MANTISSA, HARDWARE, EVEN)
        if ACROSS:
            store_square(across_scale_ptr, scale, tile_c, tile_r, tiles_r)
            quads.store_across(across_ptr, w, quad, c, Cp, tiles_r * 128, MANTISSA, HARDWARE, EVEN)
    else:
        if ALONG:
            along_scale_ptr += tile_c.to(tl.int64) * Rp
            r0, r1, r2, r3 = quads.rows_of(quad)
            i0 = inverse_of_run(
                along_scale_ptr, m[0], r0, Rp, element, MANTISSA, POWER_OF_2, HARDWARE
            )
            i1 = inverse_of_run(
                along_scale_ptr, m[1], r1, Rp, element, MANTISSA, POWER_OF_2, HARDWARE
            )
            i2 = inverse_of_run(
                along_scale_ptr, m[2], r2, Rp, element, MANTISSA, POWER_OF_2, HARDWARE
            )
            i3 = inverse_of_run(
                along_scale_ptr, m[3], r3, Rp, element, MANTISSA, POWER_OF_2, HARDWARE
            )
            w = quads.times_inverses(v, inside, (i0, i1, i2, i3), EVEN)
            quads.store_along(along_ptr, w, quad, c, Rp, tiles_c * 128, MANTISSA, HARDWARE, EVEN)
        if ACROSS:
            amax = float32_bits(tl.max(largest, axis=0, keep_dims=True), element)
            scale = scale_of_amax(amax, MANTISSA, POWER_OF_2, HARDWARE)
            tl.store(across_scale_ptr + tile_r.to(tl.int64) * Cp + c, scale, mask=c < Cp)
            w = quads.times_inverse(v, inside, reciprocal(scale, HARDWARE), EVEN)
            quads.store_across(across_ptr, w, quad, c, Cp, tiles_r * 128, MANTISSA, HARDWARE, EVEN)


@jit
def inverse_of_run(  # type: ignore[no-untyped-def]
    scale_ptr, bits, r, rows, element: tl.constexpr, MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Store the scale of each row of magnitudes, given as bits; returns its reciprocal."""
    amax = float32_bits(tl.max(bits, axis=1, keep_dims=True), element)
    scale = scale_of_amax(amax, MANTISSA, POWER_OF_2, HARDWARE)
    tl.store(scale_ptr + r, scale, mask=r < rows)
    return reciprocal(scale, HARDWARE)


@jit
def store_square(ptr, scale, row, column, columns):  # type: ignore[no-untyped-def]
    """Store the scale of a square, and after the last one of a row zeros, to a multiple of 4."""
    pitch = tl.cdiv(columns, 4) * 4
    step = tl.arange(0, 4)
    at = column + step
    # Vectors only: Triton's interpreter (3.9) takes no mask made with a scalar condition.
    is_padding = (step > 0) & (at == columns - 1 + step) & (at < pitch)
    ptr += row.to(tl.int64) * pitch + at
    tl.store(ptr, tl.where(step == 0, scale, 0.0), mask=(step == 0) | is_padding)


register(
    "cast_blockwise",
    cast_blockwise_reference,
    triton=cast_blockwise_triton,
    fake=lambda x, dtype, width, square, row, col, *_: empty(
        x, *layouts(x.shape, dtype, row, col, of=_BLOCKS[square])
    ),
)
