"""High precision -> float8 under one scale per run of 128 elements, or per square of 128 x 128.

One kernel reads each element once: a program takes a tile of 128 x 128, which knows all its scales.
"""

import torch
from torch import Tensor

from float8.config import ScalingGranularity
from float8.formats import FLOAT8_MAX, ceil16
from float8.kernels.amax import float32_bits
from float8.kernels.cast import check_cast, to_float8
from float8.kernels.cast_axiswise import amax_along, pad_to
from float8.kernels.cast_kernel import mantissa, reads_along_rows
from float8.kernels.numeric import reciprocal, scale_of_amax
from float8.kernels.quads import (
    inside_of,
    largest_of,
    load_rows,
    magnitudes,
    quads_of,
    rows_of,
    store_across,
    store_along,
    times_inverse,
    times_inverses,
    to_float32s,
)
from float8.kernels.runtime.device import has_float8_conversion
from float8.kernels.runtime.launch import Launch, Program, Slot, new, planned, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import TileLaunch, tile_at, tile_launch, tile_of_program
from float8.kernels.transpose import transpose_bytes
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import CastSpec, Part, blocks, ceil4

_SQUARE = {ScalingGranularity.BLOCK_1x128: False, ScalingGranularity.BLOCK_128x128: True}


_IN_ORDER = torch.contiguous_format  # `.contiguous()` leaves strides of dims of one element alone


def cast_blockwise(
    x: Tensor, spec: CastSpec, *, row: bool, col: bool, after: Tensor | None = None
) -> tuple[Part | None, Part | None]:
    """Cast ``x`` to float8 under a scale per block, by `amax_to_scale` of the block's amax.

    `BLOCK_1x128`: a block is a run of 128 elements along the contraction dim, so that of a row of
    ``x`` for row data, and of a column of ``x`` for column data. `BLOCK_128x128`: it is a square,
    and column data are the transposed bytes and scales of row data. A block that crosses the end of
    ``x`` covers what is there. The arithmetic of an element is that of :func:`cast`. Both layouts
    come from one read of ``x``.

    Args:
        x: [R, C] float32, bfloat16 or float16; any strides. Slow, but right, where no dim is
            contiguous.
        spec: format, granularity `BLOCK_1x128` or `BLOCK_128x128`, and whether scales are rounded
            up to powers of two.
        row: whether to return row data.
        col: whether to return column data.
        after: what a compiler must have computed first, as in :func:`cast`; not read.

    Returns:
        ``(row, col)``, None where not asked for. Row data is [R, C], column data [C, R], both
        contiguous and padded with zeros, along what is contracted to whole blocks: `BLOCK_1x128` to
        multiples of 16 and 128, `BLOCK_128x128` of 128 and 128. The scales lie as GEMMs want them:
        of data [M, K] and `BLOCK_1x128` they are [M, K / 128] with strides (1, M), those of padding
        rows that of amax 0; of `BLOCK_128x128` [M / 128, K / 128], contiguous, their second dim
        padded with zeros to a multiple of 4.
        No gradient flows through it.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: ``x`` is not 2-D, neither layout is asked for, or the granularity is another.
    """
    _check(x, spec, row, col)
    args = (x, spec.dtype, _SQUARE[spec.granularity], row, col, spec.power_of_2)
    if x.is_cuda and takes_triton_directly(x):
        out = cast_blockwise_triton(*args)
    else:
        out = torch.ops.float8.cast_blockwise.default(*args, after)
    return Part(out[0], out[1]) if row else None, Part(out[-2], out[-1]) if col else None


def cast_blockwise_traced(
    x: Tensor, spec: CastSpec, *, row: bool, col: bool
) -> tuple[Part | None, Part | None]:
    """:func:`cast_blockwise` as plain torch code, which a compiler fuses into what produces ``x``.

    It may then see the producer's values before they are rounded to the dtype of ``x``. Only the
    transposition of column data is an op of its own; so is the whole cast where C is no multiple of
    128, or rows are not contiguous.
    """
    _check(x, spec, row, col)
    if x.shape[1] % 128 != 0 or x.stride(1) != 1:
        # Nothing gained, and Inductor's C++ (torch 2.13) drops the last run where it is not whole.
        return cast_blockwise(x.detach(), spec, row=row, col=col)
    square = _SQUARE[spec.granularity]
    out = cast_blockwise_reference(x.detach(), spec.dtype, square, row, col, spec.power_of_2)
    return Part(out[0], out[1]) if row else None, Part(out[-2], out[-1]) if col else None


def _check(x: Tensor, spec: CastSpec, row: bool, col: bool) -> None:
    check_cast(x, spec.dtype, row, col)
    if spec.granularity not in _SQUARE:
        raise ValueError(
            f"cast_blockwise: got {spec.granularity}, expected BLOCK_1x128 or BLOCK_128x128"
        )


def ceil128(n: int) -> int:
    """The smallest multiple of 128 that is not below ``n``."""
    return blocks(n) * 128


# ---------------------------------------------------------------- plain-torch twin


def cast_blockwise_reference(
    x: Tensor,
    dtype: torch.dtype,
    square: bool,
    row: bool,
    col: bool,
    power_of_2: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Plain-torch twin: row data and scales, column data and scales, those asked for."""
    if square:
        return _squares(x, dtype, row, col, power_of_2)
    R, C = x.shape
    tall, wide = blocks(R), blocks(C)
    out = []
    if row:
        runs = pad_to(x, R, wide * 128).view(R, wide, 128)
        amax = amax_along(runs, 2)
        data = to_float8(runs, amax_to_scale(amax, dtype, power_of_2), dtype)
        amax = pad_to(amax.squeeze(2).t().contiguous(), wide, ceil16(R))
        # Padding is zero also where a scale is NaN.
        out += [pad_to(data.flatten(1)[:, :C].contiguous(), ceil16(R), wide * 128)]
        out += [amax_to_scale(amax, dtype, power_of_2).t()]
    if col:
        runs = pad_to(x, tall * 128, C).view(tall, 128, C)
        amax = amax_along(runs, 1)
        data = to_float8(runs, amax_to_scale(amax, dtype, power_of_2), dtype)
        amax = pad_to(amax.squeeze(1).contiguous(), tall, ceil16(C))
        out += [transpose_bytes(pad_to(data.flatten(0, 1)[:R], tall * 128, C))]
        out += [amax_to_scale(amax, dtype, power_of_2).t()]
    return out


def _squares(x: Tensor, dtype: torch.dtype, row: bool, col: bool, power_of_2: bool) -> list[Tensor]:
    R, C = x.shape
    tall, wide = blocks(R), blocks(C)
    runs = pad_to(x, tall * 128, wide * 128).view(tall, 128, wide, 128)
    # Of runs first: that fuses into what produces x.
    scale = amax_to_scale(amax_along(amax_along(runs, 3), 1), dtype, power_of_2)
    data = to_float8(runs, scale, dtype).flatten(2).flatten(0, 1)[:R, :C].contiguous()
    data, scale = pad_to(data, tall * 128, wide * 128), scale.squeeze(3).squeeze(1)
    out = []
    if row:
        out += [data, pad_to(scale, tall, ceil4(wide)).clone(memory_format=_IN_ORDER)]
    if col:
        out += [transpose_bytes(data)]
        out += [pad_to(scale.t(), wide, ceil4(tall)).clone(memory_format=_IN_ORDER)]
    return out


# ---------------------------------------------------------------- Triton


def cast_blockwise_triton(
    x: Tensor,
    dtype: torch.dtype,
    square: bool,
    row: bool,
    col: bool,
    power_of_2: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Triton code of the op: row data and scales, column data and scales, those asked for."""
    return _program(x, dtype, square, row, col, power_of_2)(x)


def config_of(R: int, C: int, *, columns_of_runs: bool) -> TileLaunch:
    """The launch configuration for a matrix [R, C]."""
    # Scales of columns take more registers: fewer, larger threads.
    return tile_launch(R, C, 128, 128, 4 if columns_of_runs else 8)


def casting(
    x: Slot,
    dtype: torch.dtype,
    square: bool,
    row: bool,
    col: bool,
    power_of_2: bool,
    config: TileLaunch | None = None,
) -> Program:
    """Casts ``x`` [R, C], under one launch configuration if given."""
    (R, C), (stride_r, stride_c) = x.shape, x.strides
    along, across = _new_part(R, C, dtype, square, row), _new_part(C, R, dtype, square, col)
    results = [slot for slot in (*along, *across) if slot is not None]
    if R * C == 0:
        return Program([x], results, [])
    makes = row, col
    if not reads_along_rows(x.strides):  # the kernel reads x.t()
        R, C, stride_r, stride_c = C, R, stride_c, stride_r
        along, across, makes = across, along, (col, row)
    config = config or config_of(R, C, columns_of_runs=col and not square)
    constants = (
        square,
        *makes,
        mantissa(dtype),
        FLOAT8_MAX[dtype],
        power_of_2,
        has_float8_conversion(x.device),
        config.even,
        config.group,
    )
    slots, integers = (x, *along, *across), (R, C, stride_r, stride_c)
    launch = Launch(
        _cast_blockwise_kernel, config.programs, slots, integers, constants, config.num_warps
    )
    return Program([x], results, [launch])


_program = planned(casting)


def _new_part(
    rows: int, columns: int, dtype: torch.dtype, square: bool, wanted: bool
) -> tuple[Slot | None, Slot | None]:
    """Data and scales of a tensor [rows, columns]; or two None."""
    if not wanted:
        return None, None
    data = new(_data_shape(rows, columns, square), dtype)
    first, second = _scale_shape(rows, columns, square)
    if square:
        return data, new((first, second), torch.float32)
    return data, new((second, first), torch.float32, strides=(1, second))


def _data_shape(rows: int, columns: int, square: bool) -> tuple[int, int]:
    """The shape of data of a tensor [rows, columns], which is contracted along its columns."""
    return ceil128(rows) if square else ceil16(rows), ceil128(columns)


def _scale_shape(rows: int, columns: int, square: bool) -> tuple[int, int]:
    """How the scales of data of a tensor [rows, columns] lie in memory."""
    if square:
        return blocks(rows), ceil4(blocks(columns))
    return blocks(columns), ceil16(rows)


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
    FLOAT8_MAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
):
    PAD: tl.constexpr = 128 if SQUARE else 16
    Rp, Cp = tl.cdiv(R, PAD) * PAD, tl.cdiv(C, PAD) * PAD
    tiles_r, tiles_c = tl.cdiv(R, 128), tl.cdiv(C, 128)
    tile_r, tile_c = tile_at(tile_of_program(), R, C, 128, 128, GROUP)
    quad, c = quads_of(tile_r, tile_c, 128, 128)
    inside = inside_of(quad, c, R, C)
    x = load_rows(x_ptr + c * stride_c, quad, stride_r, inside, EVEN)
    v = to_float32s(x, HARDWARE)
    m = magnitudes(x)
    largest = largest_of(m)
    element: tl.constexpr = x[0].dtype
    if SQUARE:
        amax = float32_bits(tl.max(tl.max(largest, axis=1), axis=0), element)
        scale = scale_of_amax(amax, FLOAT8_MAX, POWER_OF_2, HARDWARE)
        w = times_inverse(v, inside, reciprocal(scale, HARDWARE), EVEN)
        if ALONG:
            store_square(along_scale_ptr, scale, tile_r, tile_c, tiles_c)
            store_along(along_ptr, w, quad, c, Rp, tiles_c * 128, MANTISSA, HARDWARE, EVEN)
        if ACROSS:
            store_square(across_scale_ptr, scale, tile_c, tile_r, tiles_r)
            store_across(across_ptr, w, quad, c, Cp, tiles_r * 128, MANTISSA, HARDWARE, EVEN)
    else:
        if ALONG:
            along_scale_ptr += tile_c.to(tl.int64) * Rp
            r0, r1, r2, r3 = rows_of(quad)
            i0 = inverse_of_run(
                along_scale_ptr, m[0], r0, Rp, element, FLOAT8_MAX, POWER_OF_2, HARDWARE
            )
            i1 = inverse_of_run(
                along_scale_ptr, m[1], r1, Rp, element, FLOAT8_MAX, POWER_OF_2, HARDWARE
            )
            i2 = inverse_of_run(
                along_scale_ptr, m[2], r2, Rp, element, FLOAT8_MAX, POWER_OF_2, HARDWARE
            )
            i3 = inverse_of_run(
                along_scale_ptr, m[3], r3, Rp, element, FLOAT8_MAX, POWER_OF_2, HARDWARE
            )
            w = times_inverses(v, inside, (i0, i1, i2, i3), EVEN)
            store_along(along_ptr, w, quad, c, Rp, tiles_c * 128, MANTISSA, HARDWARE, EVEN)
        if ACROSS:
            amax = float32_bits(tl.max(largest, axis=0, keep_dims=True), element)
            scale = scale_of_amax(amax, FLOAT8_MAX, POWER_OF_2, HARDWARE)
            tl.store(across_scale_ptr + tile_r.to(tl.int64) * Cp + c, scale, mask=c < Cp)
            w = times_inverse(v, inside, reciprocal(scale, HARDWARE), EVEN)
            store_across(across_ptr, w, quad, c, Cp, tiles_r * 128, MANTISSA, HARDWARE, EVEN)


@jit
def inverse_of_run(  # type: ignore[no-untyped-def]
    scale_ptr, bits, r, rows, element: tl.constexpr, FLOAT8_MAX: tl.constexpr,
    POWER_OF_2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Store the scale of each row of magnitudes, given as bits; returns its reciprocal."""
    amax = float32_bits(tl.max(bits, axis=1, keep_dims=True), element)
    scale = scale_of_amax(amax, FLOAT8_MAX, POWER_OF_2, HARDWARE)
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
    x: Tensor,
    dtype: torch.dtype,
    square: bool,
    row: bool,
    col: bool,
    power_of_2: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    out = []
    for asked, (rows, columns) in ((row, x.shape), (col, x.shape[::-1])):
        if asked:
            scale = x.new_empty(_scale_shape(rows, columns, square), dtype=torch.float32)
            out += [x.new_empty(_data_shape(rows, columns, square), dtype=dtype)]
            out += [scale if square else scale.t()]
    return out


register(
    "cast_blockwise",
    cast_blockwise_reference,
    triton=cast_blockwise_triton,
    fake=_cast_blockwise_fake,
)
