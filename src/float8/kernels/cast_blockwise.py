"""High precision -> float8 under one scale per run of 128 elements, or per square of 128 x 128.

One kernel reads each element once: a program takes a tile of 128 x 128, which knows all its scales.
The way in is `cast_finer`.
"""

from typing import Any

import torch
from torch import Tensor

from float8.formats import ceil16
from float8.kernels import quads
from float8.kernels.amax import float32_bits
from float8.kernels.cast_axiswise import cast_along, pad_to
from float8.kernels.cast_kernel import mantissa, reads_along_rows
from float8.kernels.numeric import reciprocal, scale_of_amax
from float8.kernels.runtime.device import has_float8_conversion
from float8.kernels.runtime.launch import Program, Slot, new, planned
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import tile_at, tile_of_program, tiled
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import ceil4

_IN_ORDER = torch.contiguous_format  # `.contiguous()` leaves strides of dims of one element alone


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
    if square:
        return _squares(x, dtype, width, row, col, power_of_2)
    R, C = x.shape
    Rp, Cp = (R + 15) // 16 * 16, (C + 15) // 16 * 16  # `ceil16`, without calls in eager mode
    tall, wide = -(-R // width), -(-C // width)
    out = []
    if row:
        runs = pad_to(x, R, wide * width).view(R, wide, width)
        amax, _, data = cast_along(runs, dtype, power_of_2, 2)
        amax = pad_to(amax.squeeze(2).t().contiguous(), wide, Rp)
        # Padding is zero also where a scale is NaN.
        out += [pad_to(data.flatten(1)[:, :C].contiguous(), Rp, wide * width)]
        out += [amax_to_scale(amax, dtype, power_of_2).t()]
    if col:
        runs = pad_to(x, tall * width, C).view(tall, width, C)
        amax, _, data = cast_along(runs, dtype, power_of_2, 1)
        amax = pad_to(amax.squeeze(1).contiguous(), tall, Cp)
        data = pad_to(data.flatten(0, 1)[:R], tall * width, C)
        out += [torch.ops.float8.transpose.default(data, None)]
        out += [amax_to_scale(amax, dtype, power_of_2).t()]
    return out


def _squares(
    x: Tensor, dtype: torch.dtype, width: int, row: bool, col: bool, power_of_2: bool
) -> list[Tensor]:
    R, C = x.shape
    tall, wide = -(-R // width), -(-C // width)
    squares = pad_to(x, tall * width, wide * width).view(tall, width, wide, width)
    # Of runs first: that fuses into what produces x.
    _, scale, data = cast_along(squares, dtype, power_of_2, 3, 1)
    data = data.flatten(2).flatten(0, 1)[:R, :C].contiguous()
    data, scale = pad_to(data, tall * width, wide * width), scale.squeeze(3).squeeze(1)
    out = []
    if row:
        out += [data, pad_to(scale, tall, ceil4(wide)).clone(memory_format=_IN_ORDER)]
    if col:
        out += [torch.ops.float8.transpose.default(data, None)]
        out += [pad_to(scale.t(), wide, ceil4(tall)).clone(memory_format=_IN_ORDER)]
    return out


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
    along = _new_part(R, C, dtype, width, square) if row else (None, None)
    across = _new_part(C, R, dtype, width, square) if col else (None, None)
    results = [slot for slot in (*along, *across) if slot is not None]
    if R * C == 0:
        return Program([x], results, [])
    makes = row, col
    if not reads_along_rows(x.strides):  # the kernel reads x.t()
        R, C, stride_r, stride_c = C, R, stride_c, stride_r
        along, across, makes = across, along, (col, row)
    hardware = has_float8_conversion(x.device)
    constants = (square, *makes, mantissa(dtype), power_of_2, hardware)
    # Scales of columns take more registers: fewer, larger threads.
    tiles = ((128, 128, 4 if col and not square else 8),)
    slots, integers = (x, *along, *across), (R, C, stride_r, stride_c)
    launch = tiled(_cast_blockwise_kernel, tiles, x.device, slots, integers, constants)
    return Program([x], results, [launch])


def _new_part(
    rows: int, columns: int, dtype: torch.dtype, width: int, square: bool
) -> tuple[Slot, Slot]:
    """Allocate data and scales of a tensor [rows, columns], which is contracted along its columns.

    Sizes may be symbolic.
    """
    wide = -(-columns // width)
    if square:
        tall = -(-rows // width)
        return new((tall * width, wide * width), dtype), new((tall, ceil4(wide)), torch.float32)
    Rp = ceil16(rows)
    return new((Rp, wide * width), dtype), new((Rp, wide), torch.float32, strides=(1, Rp))


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


def _cast_blockwise_fake(
    x: Tensor, dtype: torch.dtype, width: int, square: bool, row: bool, col: bool, *_: Any
) -> list[Tensor]:
    out = []
    for rows, columns in [x.shape] * row + [x.shape[::-1]] * col:
        data, scale = _new_part(rows, columns, dtype, width, square)
        out += [x.new_empty(data.shape, dtype=dtype)]
        in_memory = x.new_empty(scale.shape if square else scale.shape[::-1], dtype=scale.dtype)
        out += [in_memory if square else in_memory.t()]
    return out


register(
    "cast_blockwise",
    cast_blockwise_reference,
    triton=cast_blockwise_triton,
    fake=_cast_blockwise_fake,
)
