"""High precision -> float8 under one scale per row, for row data, and per column, for column data.

Where column data is asked for, one kernel measures the amaxes of rows and columns in one read, and
a second one casts. Row data alone take one kernel, whose programs hold whole rows in registers.
The way in is `cast_finer`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from float8.config import ScalingGranularity
from float8.formats import ceil16
from float8.kernels import quads, strips
from float8.kernels.amax import float32_bits, magnitude_bits
from float8.kernels.cast import cast_blocks
from float8.kernels.cast_kernel import (
    ABSENT,
    ALONG_ALONE,
    layouts,
    mantissa,
    outputs,
    reads_along_rows,
)
from float8.kernels.numeric import reciprocal, scale_of_amax, to_float8_bits, to_float32
from float8.kernels.runtime.device import has_float8_conversion
from float8.kernels.runtime.launch import Launch, Program, Slot, empty, new, planned
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import load, or_zero, store, tile_at, tile_of_program, tiled


def cast_axiswise_reference(
    x: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    power_of_2: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Plain-torch twin: row data and scales, column data and scales, those asked for."""
    R, C = x.shape
    Rp, Cp = (R + 15) // 16 * 16, (C + 15) // 16 * 16  # `ceil16`, without calls in eager mode
    out = []
    if row:
        shape = (Rp if pad_rows else R), Cp
        data, scale = cast_blocks(x, dtype, power_of_2, shape, shape, 1)
        out += [data, scale.view(-1, 1)]
    if col:
        data, scale = cast_blocks(x, dtype, power_of_2, (Rp, Cp), (Rp, Cp), 0)
        out += [torch.ops.float8.transpose.default(data, None), scale.view(-1, 1)]
    return out


# ---------------------------------------------------------------- Triton

WIDEST_ROW = 32768
"""Programs hold rows of up to this many elements in registers; longer ones are read twice."""


def cast_axiswise_triton(x: Tensor, *how: Any, after: Any = None) -> list[Tensor]:
    """Triton code of the op, which takes what its twin takes; `after` by its name, or last."""
    return _program(x, *how[:5])(x)  # all but `after`


@planned
def _program(x: Slot, *wanted: Any) -> Callable[[Tensor], list[Tensor]]:
    if 0 in x.shape:
        return lambda x: cast_axiswise_reference(x, *wanted)
    dtype, row, col, pad_rows, power_of_2 = wanted
    (R, C), (stride_r, stride_c) = x.shape, x.strides
    parts = layouts(x.shape, dtype, row, col, pad_rows, ScalingGranularity.AXISWISE)
    along, across = parts[:2], parts[2:]
    makes, makes_across = outputs(row, col, pad_rows)
    if not reads_along_rows(x.strides):  # the kernels read x.t()
        R, C, stride_r, stride_c = C, R, stride_c, stride_r
        along, across, makes, makes_across = across, along, makes_across, makes
    integers, hardware = (R, C, stride_r, stride_c), has_float8_conversion(x.device)
    how = (mantissa(dtype), power_of_2, hardware)
    if makes_across == ABSENT and C <= WIDEST_ROW:
        return Program([x], parts, [_casting_rows((x, *along), integers, (makes, *how))])
    amaxes = new((R + C,), torch.int32, zeroed=True)
    asked = makes != ABSENT, makes_across != ABSENT
    measure = _measuring(x, amaxes, integers, *asked)
    # Half the tile of a cast under one scale: two scales for each element take more registers.
    tiles = ((64, 128, 8), (64, 64, 4), (32, 64, 4)) if asked[1] else ALONG_ALONE
    slots, constants = (x, amaxes, *along, *across), (makes, makes_across, *how)
    cast = tiled(_cast_axiswise_kernel, tiles, x.device, slots, integers, constants)
    return Program([x], parts, [measure, cast])


def _casting_rows(
    slots: tuple[Slot | None, ...], integers: tuple[int, ...], constants: tuple[object, ...]
) -> Launch:
    """Plan the kernel whose programs hold whole rows in registers, of a power of two each."""
    R, C, *_ = integers
    block_c = max(1 << (C - 1).bit_length(), 16)
    rows = max(4096 // block_c, 1)
    num_warps = min(max(rows * block_c // 1024, 1), 16)  # 32 elements a thread
    even = R % max(rows, 16) == 0 and block_c == C
    constants = (*constants, even, rows, block_c)
    return Launch(_cast_rows_kernel, -(-ceil16(R) // rows), slots, integers, constants, num_warps)


def _measuring(
    x: Slot, amaxes: Slot, integers: tuple[int, ...], of_rows: bool, of_columns: bool
) -> Launch:
    """Plan the kernel that measures; its programs go down strips."""
    R, C, *_ = integers
    rows, block_c, across = strips.strips_of(x, R, C)
    constants = (of_rows, of_columns, C % block_c == 0, strips.BLOCK_R, block_c)
    slots, integers, programs = (x, amaxes), (*integers, rows), -(-R // rows) * across
    return Launch(_measure_kernel, programs, slots, integers, constants, strips.NUM_WARPS)


@jit
def _cast_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    data_ptr,  # [R or Rp, Cp]
    scale_ptr,  # [R or Rp]
    R,
    C,
    stride_r,
    stride_c,
    ALONG: tl.constexpr,
    MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    Rp = tl.cdiv(R, 16) * 16
    Cp = tl.cdiv(C, 16) * 16
    rows = R if ALONG == 1 else Rp
    # 64-bit, so that offsets are.
    r = (tile_of_program() * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    inside = (r < R) & (c < C)
    x = load(x_ptr + r * stride_r + c.to(tl.int64) * stride_c, inside, EVEN)
    amax = float32_bits(tl.max(magnitude_bits(x), axis=1, keep_dims=True), x.dtype)
    scale = scale_of_amax(amax, MANTISSA, POWER_OF_2, HARDWARE)
    tl.store(scale_ptr + r, scale, mask=r < rows)
    # An Inf becomes NaN by itself: its scale is Inf or NaN.
    v = or_zero(to_float32(x, HARDWARE) * reciprocal(scale, HARDWARE), inside, EVEN)
    data_ptr = data_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + r * Cp + c
    store(data_ptr, to_float8_bits(v, MANTISSA, HARDWARE), (r < rows) & (c < Cp), EVEN)


@jit
def _measure_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    amax_ptr,  # [R + C] int32, zeros: is raised to the bits of amaxes, of rows, then of columns
    R,
    C,
    stride_r,
    stride_c,
    rows,  # of a program
    OF_ROWS: tl.constexpr,
    OF_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    across = tl.cdiv(C, BLOCK_C)
    walk = tile_of_program()
    begin = walk // across * rows
    end = tl.minimum(begin + rows, R)
    strips.measure_strip(
        x_ptr, amax_ptr, amax_ptr + R, begin, end, walk % across, C, stride_r, stride_c,
        OF_ROWS, OF_COLUMNS, False, EVEN, BLOCK_R, BLOCK_C,
    )  # fmt: skip


@jit
def _cast_axiswise_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    amax_ptr,  # [R + C] int32: the bits of the amaxes of rows, then of columns
    along_ptr,  # contiguous along C, at least [R, C]
    along_scale_ptr,  # [rows of along]
    across_ptr,  # contiguous along R, at least [C, R]
    across_scale_ptr,  # [rows of across]
    R,
    C,
    stride_r,
    stride_c,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    Rp = tl.cdiv(R, 16) * 16
    Cp = tl.cdiv(C, 16) * 16
    # Forwards: measuring went backwards, and so left the beginning in the L2 cache.
    tile_r, tile_c = tile_at(tl.program_id(0), Rp, Cp, BLOCK_R, BLOCK_C, GROUP)
    quad, c = quads.quads_of(tile_r, tile_c, BLOCK_R, BLOCK_C)
    inside = quads.inside_of(quad, c, R, C)
    v = quads.to_float32s(
        quads.load_rows(x_ptr + c * stride_c, quad, stride_r, inside, EVEN), HARDWARE
    )
    if ACROSS != 0:
        rows = C if ACROSS == 1 else Cp
        scale = scale_of_amax(load(amax_ptr + R + c, c < C, EVEN), MANTISSA, POWER_OF_2, HARDWARE)
        if tile_r == 0:
            store(across_scale_ptr + c, scale, c < rows, EVEN)
        w = quads.times_inverse(v, inside, reciprocal(scale, HARDWARE), EVEN)
        quads.store_across(across_ptr, w, quad, c, rows, Rp, MANTISSA, HARDWARE, EVEN)
    if ALONG != 0:
        rows = R if ALONG == 1 else Rp
        r0, r1, r2, r3 = quads.rows_of(quad)
        m0, m1 = load(amax_ptr + r0, r0 < R, EVEN), load(amax_ptr + r1, r1 < R, EVEN)
        m2, m3 = load(amax_ptr + r2, r2 < R, EVEN), load(amax_ptr + r3, r3 < R, EVEN)
        scales = quads.scales_of((m0, m1, m2, m3), MANTISSA, POWER_OF_2, HARDWARE)
        if tile_c == 0:
            quads.store_scales(along_scale_ptr, quad, scales, rows)
        w = quads.times_inverses(v, inside, quads.reciprocals(scales, HARDWARE), EVEN)
        quads.store_along(along_ptr, w, quad, c, rows, Cp, MANTISSA, HARDWARE, EVEN)


register(
    "cast_axiswise",
    cast_axiswise_reference,
    triton=cast_axiswise_triton,
    fake=lambda x, dtype, row, col, pad_rows, *_: empty(
        x, *layouts(x.shape, dtype, row, col, pad_rows, ScalingGranularity.AXISWISE)
    ),
)
