"""The kernel of casts under one scale, that of `cast` and `cast_delayed`."""

import torch

from float8.config import Granularity, ScalingGranularity
from float8.formats import GEMM_ALIGNMENT
from float8.kernels import quads
from float8.kernels.numeric import scale_of_amax
from float8.kernels.runtime.device import has_float8_conversion
from float8.kernels.runtime.launch import Launch, Slot, new
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import ALONG_AND_ACROSS, tile_at, tile_of_program, tiled

# Where the kernel takes the scale from: it is given; measured, from amaxes to be joined; or from
# the history, and measured only where that knows none.
GIVEN, MEASURED, HISTORY = 0, 1, 2

# What a kernel makes of one of its two outputs.
ABSENT, EXACT_ROWS, PADDED_ROWS = 0, 1, 2

ALONG_ALONE = ((16, 256, 4), (16, 128, 2))
"""Tiles of kernels that write no transposed copy."""


def reads_along_rows(strides: tuple[int, ...]) -> bool:
    """Tell whether the kernel takes x as it lies; else x.t(), with row and col swapped."""
    return strides[1] == 1 or strides[0] != 1


def layouts(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    of: Granularity = ScalingGranularity.TENSORWISE,
) -> tuple[Slot | None, ...]:
    """Describe row data and their scales, column data and theirs, of a tensor [R, C].

    None for what is not asked for, and for the one scale of a tensor. Sizes may be symbolic.
    """
    R, C = shape
    return *_layout(R, C, dtype, row, pad_rows, of), *_layout(C, R, dtype, col, True, of)


def _layout(
    R: int, C: int, dtype: torch.dtype, wanted: bool, pads_rows: bool, of: Granularity
) -> tuple[Slot | None, Slot | None]:
    if not wanted:
        return None, None
    if pads_rows or of.by_blocks:
        R = _ceil(R, of.height if of.square else None)
    C = _ceil(C, of.width)
    if of.one_scale:
        return new((R, C), dtype), None
    # Scales of runs lie as those of the transposed tensor.
    strides = (1, R) if of.by_blocks and not of.square else None
    return new((R, C), dtype), new(of.scales((R, C)), torch.float32, strides)


def _ceil(n: int, block: int | None) -> int:
    to = block or GEMM_ALIGNMENT
    return (n + to - 1) // to * to  # not -(-n // to): torch 2.11 fails on negative symbols


def casting(
    x: Slot,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    power_of_2: bool = False,
    *,
    scale: Slot | None = None,
    parts: Slot | None = None,
    amax: Slot | None = None,
    rounded: bool = False,
) -> tuple[list[Slot | None], list[Launch]]:
    """Plan the results and launches that cast ``x`` [R, C]; no launch if that is empty.

    Args:
        x: what is cast, of any strides.
        dtype: the float8 format.
        row: whether row data is the second result, or None.
        col: whether column data is the third.
        pad_rows: whether the row data has its number of rows padded to a multiple of 16 too.
        power_of_2: whether a scale from an amax is rounded up to a power of two.
        scale: the given one; with ``parts`` that of the history, and 0 where that knows none.
        parts: [P], amaxes by `measuring`: the first result is then the scale that was used, else
            None.
        amax: is raised to the amax of what is cast.
        rounded: whether ``x`` is rounded to bfloat16 first; without ``amax``.
    """
    R, C = x.shape
    stride_r, stride_c = x.strides
    used = None if parts is None else new((), torch.float32)
    along, _, across, _ = layouts(x.shape, dtype, row, col, pad_rows)
    results = [used, along, across]
    if R * C == 0:
        return results, []
    makes, makes_across = outputs(row, col, pad_rows)
    if not reads_along_rows(x.strides):  # the kernel reads x.t()
        R, C, stride_r, stride_c = C, R, stride_c, stride_r
        along, across, makes, makes_across = across, along, makes_across, makes
    source = GIVEN if parts is None else MEASURED if scale is None else HISTORY
    joined = 0 if parts is None else parts.shape[0]
    constants = (
        rounded,
        makes,
        makes_across,
        mantissa(dtype),
        source,
        power_of_2_above(joined),
        power_of_2,
        amax is not None,
        has_float8_conversion(x.device),
    )
    slots = (x, along, across, scale, parts, used, amax)
    integers = (R, C, stride_r, stride_c, joined)
    tiles = ALONG_ALONE if across is None else ALONG_AND_ACROSS
    return results, [tiled(_cast_kernel, tiles, x.device, slots, integers, constants)]


def outputs(row: bool, col: bool, pad_rows: bool) -> tuple[int, int]:
    """Say what a kernel makes of row data, and of column data."""
    made = PADDED_ROWS if pad_rows else EXACT_ROWS
    return made if row else ABSENT, PADDED_ROWS if col else ABSENT


def mantissa(dtype: torch.dtype) -> int:
    """Count the mantissa bits of a format, by which kernels tell it."""
    return 3 if dtype == torch.float8_e4m3fn else 2


def power_of_2_above(parts: int) -> int:
    """Return the smallest power of two that is not below ``parts``."""
    return 1 << (parts - 1).bit_length() if parts else 1


@jit(do_not_specialize_on_alignment=["scale_ptr", "parts_ptr", "scale_out_ptr", "amax_ptr"])
def _cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
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
    ROUNDED: tl.constexpr,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SOURCE: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two, not below parts
    POWER_OF_2: tl.constexpr,
    RECORD: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    Rp = tl.cdiv(R, 16) * 16
    Cp = tl.cdiv(C, 16) * 16
    tile_r, tile_c = tile_at(tile_of_program(), Rp, Cp, BLOCK_R, BLOCK_C, GROUP)
    quad, c = quads.quads_of(tile_r, tile_c, BLOCK_R, BLOCK_C)
    inside = quads.inside_of(quad, c, R, C)
    x = quads.load_rows(x_ptr + c * stride_c, quad, stride_r, inside, EVEN)
    v = quads.to_float32s(x, HARDWARE)
    if ROUNDED:
        v = quads.in_bfloat16(v, HARDWARE)

    scale = choose_scale(scale_ptr, parts_ptr, parts, SOURCE, PARTS, MANTISSA, POWER_OF_2)
    if SOURCE != 0:
        if tl.program_id(0) == 0:
            tl.store(scale_out_ptr, scale)
    if RECORD:
        quads.record_amax(amax_ptr, x)  # of x, which has 16 bits, not of v, which has 32

    v = quads.scaled(v, inside, tl.div_rn(1.0, scale), EVEN)
    if ALONG != 0:
        rows = R if ALONG == 1 else Rp
        quads.store_along(along_ptr, v, quad, c, rows, Cp, MANTISSA, HARDWARE, EVEN)
    if ACROSS != 0:
        rows = C if ACROSS == 1 else Cp
        quads.store_across(across_ptr, v, quad, c, rows, Rp, MANTISSA, HARDWARE, EVEN)


@jit
def choose_scale(  # type: ignore[no-untyped-def]
    scale_ptr,
    parts_ptr,
    parts,
    SOURCE: tl.constexpr,
    PARTS: tl.constexpr,
    MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr,
):
    """Choose the decode scale, from where ``SOURCE`` says; see ``GIVEN``."""
    if SOURCE == 1:
        scale = _measured_scale(parts_ptr, parts, PARTS, MANTISSA, POWER_OF_2)
    else:
        scale = tl.load(scale_ptr)
        if SOURCE == 2:
            if scale == 0.0:
                scale = _measured_scale(parts_ptr, parts, PARTS, MANTISSA, POWER_OF_2)
    return scale


@jit
def _measured_scale(  # type: ignore[no-untyped-def]
    parts_ptr, parts, PARTS: tl.constexpr, MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr
):
    at = tl.arange(0, PARTS)
    parts_ptr = parts_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    bits = tl.max(tl.load(parts_ptr + at, mask=at < parts, other=0))
    return scale_of_amax(bits, MANTISSA, POWER_OF_2)
