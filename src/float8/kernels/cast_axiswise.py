"""High precision -> float8 under one scale per row, for row data, and per column, for column data.

Where column data is asked for, one kernel measures the amaxes of rows and columns in one read, and
a second one casts. Row data alone take one kernel, whose programs hold whole rows in registers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.config import ScalingGranularity
from float8.formats import FLOAT8_MAX, ceil16
from float8.kernels.amax import float32_bits, magnitude_bits
from float8.kernels.cast import check_cast, to_float8
from float8.kernels.cast_kernel import (
    ABSENT,
    launch_config,
    mantissa,
    outputs,
    reads_along_rows,
)
from float8.kernels.numeric import reciprocal, scale_of_amax, to_float8_bits, to_float32
from float8.kernels.quads import (
    inside_of,
    load_rows,
    quads_of,
    rows_of,
    store_across,
    store_along,
    times_inverse,
    times_inverses,
    to_float32s,
)
from float8.kernels.runtime.device import has_float8_conversion, sm_count
from float8.kernels.runtime.launch import Launch, Program, Slot, new, planned, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import (
    TileLaunch,
    fitting,
    load,
    or_zero,
    store,
    tile_at,
    tile_of_program,
)
from float8.kernels.transpose import transpose_bytes
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import CastSpec, Part


def cast_axiswise(
    x: Tensor,
    spec: CastSpec,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    after: Tensor | None = None,
) -> tuple[Part | None, Part | None]:
    """Cast ``x`` to float8, row data under a scale per row, column data under one per column.

    Each scale is that of the amax of its row or column, by `amax_to_scale`; the arithmetic of an
    element is that of :func:`cast`. What is not finite spoils its own row and column only.

    Args:
        x: [R, C] float32, bfloat16 or float16; any strides. Slow, but right, where no dim is
            contiguous.
        spec: format, granularity `AXISWISE`, and whether scales are rounded up to powers of two.
        row: whether to return row data.
        col: whether to return column data.
        pad_rows: whether the row data has its number of rows padded to a multiple of 16 too.
        after: what a compiler must have computed first, as in :func:`cast`; not read.

    Returns:
        ``(row, col)``, None where not asked for; all contiguous. Row data is [R, ceil16(C)], or
        [ceil16(R), ceil16(C)] if ``pad_rows``, with scales [rows, 1]; column data [ceil16(C),
        ceil16(R)], the transpose, with scales [ceil16(C), 1]. Padding is zero, its scales are those
        of amax 0. No gradient flows through it.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: ``x`` is not 2-D, neither layout is asked for, or the granularity is another.
    """
    _check(x, spec, row, col)
    args = (x, spec.dtype, row, col, pad_rows, spec.power_of_2)
    if x.is_cuda and takes_triton_directly(x):
        out = cast_axiswise_triton(*args)
    else:
        out = torch.ops.float8.cast_axiswise.default(*args, after)
    return Part(out[0], out[1]) if row else None, Part(out[-2], out[-1]) if col else None


def cast_axiswise_traced(
    x: Tensor, spec: CastSpec, *, row: bool, col: bool, pad_rows: bool = False
) -> tuple[Part | None, Part | None]:
    """:func:`cast_axiswise` as plain torch code, which a compiler fuses into what produces ``x``.

    It may then see the producer's values before they are rounded to the dtype of ``x``. Only the
    transposition of column data is an op of its own.
    """
    _check(x, spec, row, col)
    out = cast_axiswise_reference(x.detach(), spec.dtype, row, col, pad_rows, spec.power_of_2)
    return Part(out[0], out[1]) if row else None, Part(out[-2], out[-1]) if col else None


def _check(x: Tensor, spec: CastSpec, row: bool, col: bool) -> None:
    check_cast(x, spec.dtype, row, col)
    if spec.granularity is not ScalingGranularity.AXISWISE:
        raise ValueError(f"cast_axiswise: got {spec.granularity}, expected AXISWISE")


# ---------------------------------------------------------------- plain-torch twin


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
    out = []
    if row:
        amax = amax_along(x, 1)
        data = to_float8(x, amax_to_scale(amax, dtype, power_of_2), dtype)
        rows = ceil16(R) if pad_rows else R
        scale = amax_to_scale(pad_to(amax, rows, 1), dtype, power_of_2)
        out += [pad_to(data.contiguous(), rows, ceil16(C)), scale]
    if col:
        amax = amax_along(x, 0)
        data = to_float8(x, amax_to_scale(amax, dtype, power_of_2), dtype)
        scale = amax_to_scale(pad_to(amax, 1, ceil16(C)), dtype, power_of_2)
        out += [transpose_bytes(data), scale.view(-1, 1)]
    return out


def amax_along(x: Tensor, dim: int) -> Tensor:
    """The float32 amaxes of ``x`` along ``dim``, which stays as a dim of size 1; 0 of nothing.

    In float32 before they are taken: an amax in 16 bits would be two numbers in Inductor's code,
    rounded where a kernel loads it and not yet rounded in the kernel that takes it. Data would be
    cast under one scale and multiplied with the other.
    """
    if x.shape[dim] == 0:
        return x.sum(dim, keepdim=True, dtype=torch.float32)
    return x.to(torch.float32).abs().amax(dim, keepdim=True)


def pad_to(x: Tensor, rows: int, columns: int) -> Tensor:
    """``x`` [R, C] with zeros below and to the right: [rows, columns]."""
    bottom, right = rows - x.shape[0], columns - x.shape[1]
    # A compiler drops what pads by nothing. To ask it here would make it compile again for sizes
    # that need other padding.
    if not torch.compiler.is_compiling() and bottom == right == 0:
        return x
    plain = x.view(torch.uint8) if x.dtype in FLOAT8_MAX else x
    return torch.nn.functional.pad(plain, (0, right, 0, bottom)).view(x.dtype)


# ---------------------------------------------------------------- Triton

WIDEST_ROW = 32768
"""Programs hold rows of up to this many elements in registers; longer ones are read twice."""


class RowLaunch(NamedTuple):
    """Launch configuration of the kernel that holds whole rows in registers."""

    rows: int  # of a program, a power of two
    block_c: int  # a power of two, not below C
    num_warps: int
    even: bool  # the programs' blocks fill the matrix exactly: no masks
    programs: int


class WalkLaunch(NamedTuple):
    """Launch configuration of the measuring kernel: programs walk down strips of tiles."""

    block_r: int
    block_c: int
    num_warps: int
    rounds: int  # tiles of a program
    even: bool  # the tiles fill the matrix exactly: no masks
    programs: int


def row_config(R: int, C: int) -> RowLaunch:
    """For [R, C], C at most `WIDEST_ROW`, of which whole rows are held in registers."""
    block_c = max(1 << (C - 1).bit_length(), 16)
    rows = max(4096 // block_c, 1)
    num_warps = min(max(rows * block_c // 1024, 1), 16)  # 32 elements a thread
    even = R % max(rows, 16) == 0 and block_c == C
    return RowLaunch(rows, block_c, num_warps, even, -(-ceil16(R) // rows))


def walk_config(R: int, C: int, itemsize: int, sms: int) -> WalkLaunch:
    """For measuring [R, C], not empty, of elements of ``itemsize`` bytes."""
    block_r, block_c = 64, 256 // itemsize
    tiles_r, strips = -(-R // block_r), -(-C // block_c)
    rounds = min(max(tiles_r * strips // (8 * sms), 1), 8)
    return walk_launch(R, C, block_r, block_c, 4, rounds)


def tile_config(R: int, C: int, *, across: bool, sms: int) -> TileLaunch:
    """For casting [R, C]; ``across``: the copy contiguous along ``R`` is written, too."""
    # Half the tile of a cast under one scale: two scales for each element take more registers.
    if across:
        return fitting(R, C, sms, ((64, 128, 8), (64, 64, 4), (32, 64, 4)))
    return launch_config(R, C, across=False, sms=sms)


def walk_launch(
    R: int, C: int, block_r: int, block_c: int, num_warps: int, rounds: int
) -> WalkLaunch:
    """The launch configuration of given tiles for a matrix [R, C]."""
    programs = -(-R // (block_r * rounds)) * -(-C // block_c)
    even = R % block_r == 0 and C % block_c == 0
    return WalkLaunch(block_r, block_c, num_warps, rounds, even, programs)


def cast_axiswise_triton(
    x: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    power_of_2: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Triton code of the op: row data and scales, column data and scales, those asked for."""
    return _program(x, dtype, row, col, pad_rows, power_of_2)(x)


@planned
def _program(x: Slot, *wanted: Any) -> Callable[[Tensor], list[Tensor]]:
    if 0 in x.shape:
        return lambda x: cast_axiswise_reference(x, *wanted)
    return casting(x, *wanted)


def casting(
    x: Slot,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    power_of_2: bool,
    *,
    walk: WalkLaunch | None = None,
    tile: TileLaunch | None = None,
) -> Program:
    """Casts ``x`` [R, C], not empty; under given launch configurations by two kernels always."""
    (R, C), (stride_r, stride_c) = x.shape, x.strides
    rows = ceil16(R) if pad_rows else R
    along, across = (
        new_part((rows, ceil16(C)), dtype, row),
        new_part((ceil16(C), ceil16(R)), dtype, col),
    )
    results = [slot for slot in (*along, *across) if slot is not None]
    makes, makes_across = outputs(row, col, pad_rows)
    if not reads_along_rows(x.strides):  # the kernels read x.t()
        R, C, stride_r, stride_c = C, R, stride_c, stride_r
        along, across, makes, makes_across = across, along, makes_across, makes
    format_constants = (
        mantissa(dtype),
        FLOAT8_MAX[dtype],
        power_of_2,
        has_float8_conversion(x.device),
    )
    integers = (R, C, stride_r, stride_c)

    if makes_across == ABSENT and C <= WIDEST_ROW and walk is None and tile is None:
        held = row_config(R, C)
        constants = (makes, *format_constants, held.even, held.rows, held.block_c)
        launch = Launch(
            _cast_rows_kernel, held.programs, (x, *along), integers, constants, held.num_warps
        )
        return Program([x], results, [launch])

    amaxes = new((R + C,), torch.int32, zeroed=True)
    walk = walk or walk_config(R, C, x.dtype.itemsize, sm_count(x.device))
    measure = Launch(
        _measure_kernel,
        walk.programs,
        (x, amaxes),
        (*integers, walk.rounds),
        (makes != ABSENT, makes_across != ABSENT, walk.even, walk.block_r, walk.block_c),
        walk.num_warps,
    )
    tile = tile or tile_config(R, C, across=makes_across != ABSENT, sms=sm_count(x.device))
    cast = Launch(
        _cast_axiswise_kernel,
        tile.programs,
        (x, amaxes, *along, *across),
        integers,
        (makes, makes_across, *format_constants, *tile.constants),
        tile.num_warps,
    )
    return Program([x], results, [measure, cast])


def new_part(
    shape: tuple[int, int], dtype: torch.dtype, wanted: bool
) -> tuple[Slot | None, Slot | None]:
    """Data of this shape and a scale for each of its rows; or two None."""
    if not wanted:
        return None, None
    return new(shape, dtype), new((shape[0], 1), torch.float32)


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
    FLOAT8_MAX: tl.constexpr,
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
    scale = scale_of_amax(amax, FLOAT8_MAX, POWER_OF_2, HARDWARE)
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
    rounds,
    OF_ROWS: tl.constexpr,
    OF_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    strips = tl.cdiv(C, BLOCK_C)
    walk = tile_of_program()
    tile = walk // strips * rounds
    end = tl.minimum(tile + rounds, tl.cdiv(R, BLOCK_R))
    # 64-bit, so that offsets are.
    c = (walk % strips * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    x_ptr += c[None, :] * stride_c
    largest = magnitude_bits(tl.zeros((BLOCK_R, BLOCK_C), x_ptr.dtype.element_ty))
    while tile < end:  # Triton's interpreter (3.6) takes no range of tensors
        r = (tile * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        inside = (r[:, None] < R) & (c[None, :] < C)
        bits = magnitude_bits(load(x_ptr + r[:, None] * stride_r, inside, EVEN))
        if OF_ROWS:
            of_rows = float32_bits(tl.max(bits, axis=1), x_ptr.dtype.element_ty)
            tl.atomic_max(amax_ptr + r, of_rows, mask=r < R, sem="relaxed")
        if OF_COLUMNS:
            largest = tl.maximum(largest, bits)
        tile += 1
    if OF_COLUMNS:
        of_columns = float32_bits(tl.max(largest, axis=0), x_ptr.dtype.element_ty)
        tl.atomic_max(amax_ptr + R + c, of_columns, mask=c < C, sem="relaxed")


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
    FLOAT8_MAX: tl.constexpr,
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
    quad, c = quads_of(tile_r, tile_c, BLOCK_R, BLOCK_C)
    inside = inside_of(quad, c, R, C)
    v = to_float32s(load_rows(x_ptr + c * stride_c, quad, stride_r, inside, EVEN), HARDWARE)
    if ACROSS != 0:
        rows = C if ACROSS == 1 else Cp
        scale = scale_of_amax(load(amax_ptr + R + c, c < C, EVEN), FLOAT8_MAX, POWER_OF_2, HARDWARE)
        if tile_r == 0:
            store(across_scale_ptr + c, scale, c < rows, EVEN)
        w = times_inverse(v, inside, reciprocal(scale, HARDWARE), EVEN)
        store_across(across_ptr, w, quad, c, rows, Rp, MANTISSA, HARDWARE, EVEN)
    if ALONG != 0:
        rows = R if ALONG == 1 else Rp
        r0, r1, r2, r3 = rows_of(quad)
        s0 = scale_of_amax(load(amax_ptr + r0, r0 < R, EVEN), FLOAT8_MAX, POWER_OF_2, HARDWARE)
        s1 = scale_of_amax(load(amax_ptr + r1, r1 < R, EVEN), FLOAT8_MAX, POWER_OF_2, HARDWARE)
        s2 = scale_of_amax(load(amax_ptr + r2, r2 < R, EVEN), FLOAT8_MAX, POWER_OF_2, HARDWARE)
        s3 = scale_of_amax(load(amax_ptr + r3, r3 < R, EVEN), FLOAT8_MAX, POWER_OF_2, HARDWARE)
        if tile_c == 0:
            store(along_scale_ptr + r0, s0, r0 < rows, EVEN)
            store(along_scale_ptr + r1, s1, r1 < rows, EVEN)
            store(along_scale_ptr + r2, s2, r2 < rows, EVEN)
            store(along_scale_ptr + r3, s3, r3 < rows, EVEN)
        i0, i1, i2, i3 = (
            reciprocal(s0, HARDWARE),
            reciprocal(s1, HARDWARE),
            reciprocal(s2, HARDWARE),
            reciprocal(s3, HARDWARE),
        )
        w = times_inverses(v, inside, (i0, i1, i2, i3), EVEN)
        store_along(along_ptr, w, quad, c, rows, Cp, MANTISSA, HARDWARE, EVEN)


def _cast_axiswise_fake(
    x: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    power_of_2: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    R, C = x.shape
    out = []
    if row:
        rows = ceil16(R) if pad_rows else R
        out += [x.new_empty((rows, ceil16(C)), dtype=dtype)]
        out += [x.new_empty((rows, 1), dtype=torch.float32)]
    if col:
        out += [x.new_empty((ceil16(C), ceil16(R)), dtype=dtype)]
        out += [x.new_empty((ceil16(C), 1), dtype=torch.float32)]
    return out


register(
    "cast_axiswise",
    cast_axiswise_reference,
    triton=cast_axiswise_triton,
    fake=_cast_axiswise_fake,
)
