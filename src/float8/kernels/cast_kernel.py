"""The kernel of casts under one scale: what is cast, and where the scale comes from.

It serves `cast`, `cast_dynamic` and `cast_delayed`, and the fused casts of SwiGLU and RMSNorm.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX, ceil16
from float8.kernels.numeric import scale_of_amax, to_float32
from float8.kernels.quads import (
    inside_of,
    load_rows,
    quads_of,
    record_amax,
    rows_of,
    scaled,
    store_across,
    store_along,
    to_float32s,
)
from float8.kernels.runtime.device import has_float8_conversion, sm_count
from float8.kernels.runtime.launch import Launch, empty
from float8.kernels.runtime.triton import jit, tl
from float8.kernels.tiles import TileLaunch, fitting, load, tile_at, tile_of_program

# What is cast: x itself, silu(x) * y, or x * rstd * weight; contiguous unless PLAIN.
PLAIN, SWIGLU, RMS_NORM = 0, 1, 2

# Where the kernel takes the scale from: it is given; measured, from amaxes to be joined; or from
# the history, and measured only where that knows none.
GIVEN, MEASURED, HISTORY = 0, 1, 2

# What the kernel makes of one of its two outputs.
_ABSENT, _EXACT_ROWS, _PADDED_ROWS = 0, 1, 2


class Kind(NamedTuple):
    """What a launch of the kernel does: all that it is compiled for, but its input."""

    source: int
    parts: int  # amaxes to join, unless GIVEN
    dtype: torch.dtype
    row: bool
    col: bool
    pad_rows: bool = False
    power_of_2: bool = False
    record: bool = False
    producer: int = PLAIN
    weight_dtype: torch.dtype | None = None  # of the norm


def launch_cast(
    x: Tensor,
    kind: Kind,
    *,
    scale: Tensor | None = None,
    parts: Tensor | None = None,
    amax: Tensor | None = None,
    y: Tensor | None = None,
    rstd: Tensor | None = None,
    weight: Tensor | None = None,
    config: TileLaunch | None = None,
) -> list[Tensor]:
    """Cast ``x`` [R, C]: the scale used unless it is `GIVEN`, row data, column data as asked for.

    ``scale`` is the given one or the history's, ``parts`` [P] are amaxes from `measure`, and
    ``amax`` is raised if ``kind.record``. `SWIGLU` reads ``y`` [R, C] too, `RMS_NORM` ``rstd`` [R]
    and ``weight`` [C].
    """
    planned = _plan(x.shape, x.stride(), x.dtype, x.device, kind, config)
    launch, row_shape, col_shape, swapped = planned
    out = []
    used = row = col = None
    if parts is not None:
        used = empty((), torch.float32, x)
        out.append(used)
    if row_shape is not None:
        row = empty(row_shape, kind.dtype, x)
        out.append(row)
    if col_shape is not None:
        col = empty(col_shape, kind.dtype, x)
        out.append(col)
    if launch is not None:
        along, across = (col, row) if swapped else (row, col)
        launch(x, y, rstd, weight, along, across, scale, parts, used, amax)
    if amax is not None and kind.record:
        torch.autograd.graph.increment_version(amax)  # as PyTorch does
    return out


def launch_config(R: int, C: int, *, across: bool, sms: int) -> TileLaunch:
    """For [R, C] read along ``C``; ``across``: the copy contiguous along ``R`` is written too."""
    # 128 x 128 writes whole 128-byte lines in both layouts.
    both = ((128, 128, 8), (64, 64, 4), (32, 64, 4))
    return fitting(R, C, sms, both if across else ((16, 256, 4), (16, 128, 2)))


def reads_along_rows(strides: tuple[int, ...]) -> bool:
    """Whether the kernel takes x as it lies; else it takes x.t(), with row and col swapped."""
    return strides[1] == 1 or strides[0] != 1


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int],
    strides: tuple[int, int],
    x_dtype: torch.dtype,
    device: torch.device,
    kind: Kind,
    config: TileLaunch | None,
) -> tuple[Launch | None, tuple[int, int] | None, tuple[int, int] | None, bool]:
    """Everything about a cast that does not depend on values; cached, as eager mode needs it.

    That is the launch, if there is anything to do; the shapes of row and column data; and whether
    the kernel reads x.t(), and so takes the outputs in the other order.
    """
    (R, C), (stride_r, stride_c) = shape, strides
    row_shape = (ceil16(R) if kind.pad_rows else R, ceil16(C)) if kind.row else None
    col_shape = (ceil16(C), ceil16(R)) if kind.col else None
    swapped = not reads_along_rows(strides)
    if R * C == 0:
        return None, row_shape, col_shape, swapped
    row = (_PADDED_ROWS if kind.pad_rows else _EXACT_ROWS) if kind.row else _ABSENT
    col = _PADDED_ROWS if kind.col else _ABSENT
    along, across = row, col
    if swapped:
        R, C, stride_r, stride_c, along, across = C, R, stride_c, stride_r, col, row
    if config is None:
        config = launch_config(R, C, across=across != _ABSENT, sms=sm_count(device))
    constants = (
        kind.producer,
        along,
        across,
        mantissa(kind.dtype),
        FLOAT8_MAX[kind.dtype],
        kind.source,
        power_of_2_above(kind.parts),
        kind.power_of_2,
        kind.record,
        has_float8_conversion(device),
        *config.constants,
    )
    integers = (R, C, stride_r, stride_c, kind.parts)
    inputs = {PLAIN: 1, SWIGLU: 2, RMS_NORM: 3}[kind.producer]  # x; x, y; x, rstd, weight
    launch = Launch(
        _cast_kernel, config.programs, device, integers, constants, config.num_warps, inputs=inputs
    )
    return launch, row_shape, col_shape, swapped


def mantissa(dtype: torch.dtype) -> int:
    """Mantissa bits of a format, by which kernels tell it."""
    return 3 if dtype == torch.float8_e4m3fn else 2


def power_of_2_above(parts: int) -> int:
    """The smallest power of two that is not below ``parts``."""
    return 1 << (parts - 1).bit_length() if parts else 1


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
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    Rp = tl.cdiv(R, 16) * 16
    Cp = tl.cdiv(C, 16) * 16
    tile_r, tile_c = tile_at(tile_of_program(), Rp, Cp, BLOCK_R, BLOCK_C, GROUP)
    quad, c = quads_of(tile_r, tile_c, BLOCK_R, BLOCK_C)
    inside = inside_of(quad, c, R, C)
    x = load_rows(x_ptr + c * stride_c, quad, stride_r, inside, EVEN)
    v = to_float32s(x, HARDWARE)
    if PRODUCER == 1:
        y = to_float32s(load_rows(y_ptr + c * stride_c, quad, stride_r, inside, EVEN), HARDWARE)
        v = swiglu(v[0], y[0]), swiglu(v[1], y[1]), swiglu(v[2], y[2]), swiglu(v[3], y[3])
    elif PRODUCER == 2:
        weight = to_float32(load(weight_ptr + c, c < C, EVEN), HARDWARE)
        r0, r1, r2, r3 = rows_of(quad)
        v0 = v[0] * load(rstd_ptr + r0, r0 < R, EVEN) * weight
        v1 = v[1] * load(rstd_ptr + r1, r1 < R, EVEN) * weight
        v2 = v[2] * load(rstd_ptr + r2, r2 < R, EVEN) * weight
        v3 = v[3] * load(rstd_ptr + r3, r3 < R, EVEN) * weight
        v = v0, v1, v2, v3

    scale = choose_scale(scale_ptr, parts_ptr, parts, SOURCE, PARTS, FLOAT8_MAX, POWER_OF_2)
    if SOURCE != 0:
        if tl.program_id(0) == 0:
            tl.store(scale_out_ptr, scale)
    if RECORD:
        if PRODUCER == 0:  # in 16 bits, not in 32
            record_amax(amax_ptr, x)
        else:
            record_amax(amax_ptr, v)

    v = scaled(v, inside, tl.div_rn(1.0, scale), EVEN)
    if ALONG != 0:
        rows = R if ALONG == 1 else Rp
        store_along(along_ptr, v, quad, c, rows, Cp, MANTISSA, HARDWARE, EVEN)
    if ACROSS != 0:
        rows = C if ACROSS == 1 else Cp
        store_across(across_ptr, v, quad, c, rows, Rp, MANTISSA, HARDWARE, EVEN)


@jit
def swiglu(gate, up):  # type: ignore[no-untyped-def]
    """``silu(gate) * up``, float32."""
    return gate * tl.sigmoid(gate) * up


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
    """The decode scale, from where ``SOURCE`` says; see ``GIVEN``."""
    if SOURCE == 1:
        scale = _measured_scale(parts_ptr, parts, PARTS, FLOAT8_MAX, POWER_OF_2)
    else:
        scale = tl.load(scale_ptr)
        if SOURCE == 2:
            if scale == 0.0:
                scale = _measured_scale(parts_ptr, parts, PARTS, FLOAT8_MAX, POWER_OF_2)
    return scale


@jit
def _measured_scale(  # type: ignore[no-untyped-def]
    parts_ptr, parts, PARTS: tl.constexpr, FLOAT8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr
):
    at = tl.arange(0, PARTS)
    parts_ptr = parts_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    bits = tl.max(tl.load(parts_ptr + at, mask=at < parts, other=0))
    return scale_of_amax(bits, FLOAT8_MAX, POWER_OF_2)
