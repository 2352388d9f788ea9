"""Planning and launching the kernel behind all casts."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX
from float8.kernels._cast_kernel import _cast_kernel
from float8.kernels._device import has_float8_conversion, sm_count
from float8.kernels._launch import Launch
from float8.kernels._memory import empty
from float8.kernels._tiles import TileLaunch, fitting, repair_programs
from float8.kernels.layout import ceil16

# What is cast: x itself, silu(x) * y, or x * rstd * weight.
PLAIN, SWIGLU, RMS_NORM = 0, 1, 2

# Where the kernel takes the scale from.
GIVEN, MEASURED, HISTORY, SPECULATIVE = 0, 1, 2, 3

# What the kernel makes of one of its two outputs.
_ABSENT, _EXACT_ROWS, _PADDED_ROWS = 0, 1, 2


class CastLaunch(NamedTuple):
    """A planned cast of tensors of one shape, layout and dtype."""

    launch: Launch | None
    """None where there is nothing to do."""

    row_shape: tuple[int, int] | None
    col_shape: tuple[int, int] | None
    swapped: bool
    """The kernel reads x.t(), and so takes the outputs in the other order."""


class Options(NamedTuple):
    """What a cast makes, apart from its input."""

    dtype: torch.dtype
    row: bool
    col: bool
    pad_rows: bool
    source: int = GIVEN
    """Where the scale comes from: `GIVEN`; `MEASURED`; `HISTORY`, measured only where that knows
    none; or `SPECULATIVE`, the larger one of history's and measured."""

    parts: int = 0
    """How many amaxes there are to join, unless `GIVEN`."""

    round_to_power_of_2: bool = False
    record: bool = False
    """Whether the amax of what is cast is joined into a tensor."""

    producer: int = PLAIN
    """What is cast: `PLAIN`, `SWIGLU` or `RMS_NORM`; x must be contiguous unless `PLAIN`."""

    weight_dtype: torch.dtype | None = None
    """That of the norm's weight."""

    repair: bool = False
    """Cast again over the output of a cast with the scale `GIVEN`, if that is not the one."""


def launch_cast(
    x: Tensor,
    options: Options,
    *,
    scale: Tensor | None = None,
    parts: Tensor | None = None,
    scale_out: Tensor | None = None,
    amax: Tensor | None = None,
    y: Tensor | None = None,
    rstd: Tensor | None = None,
    weight: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] | None = None,
    config: TileLaunch | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Cast ``x`` [R, C].

    Args:
        x: float32, bfloat16 or float16.
        options: what to make of it.
        scale: 0-dim float32, the decode scale (`GIVEN`) or that of the history.
        parts: [P] float32 as from `measure`, unless `GIVEN`.
        scale_out: 0-dim float32, receives the scale used, unless `GIVEN`.
        amax: 0-dim float32, raised to the amax of what is cast if ``options.record``.
        y: [R, C] as ``x``, for `SWIGLU`.
        rstd: [R] float32, for `RMS_NORM`.
        weight: [C] of dtype ``options.weight_dtype``, for `RMS_NORM`.
        out: as returned, to be written again; None: new ones.
        config: launch configuration; None for the usual one.

    Returns:
        ``(row_data, col_data)``, None where not asked for.
    """
    plan = _plan(x.shape, x.stride(), x.dtype, x.device, options, config)
    dtype, device = options.dtype, x.device
    row, col = (None, None) if out is None else out
    if plan.row_shape is not None and row is None:
        row = empty(plan.row_shape, dtype, device)
    if plan.col_shape is not None and col is None:
        col = empty(plan.col_shape, dtype, device)
    if plan.launch is not None:
        # Any pointer of the same type stands in for one that is absent.
        along, across = (col, row) if plan.swapped else (row, col)
        some = scale if parts is None else parts
        plan.launch(
            x,
            x if y is None else y,
            x if rstd is None else rstd,
            x if weight is None else weight,
            across if along is None else along,
            along if across is None else across,
            some if scale is None else scale,
            some if parts is None else parts,
            some if scale_out is None else scale_out,
            some if amax is None else amax,
        )
    return row, col


def cast_speculatively(
    x: Tensor, options: Options, scale: Tensor, amax: Tensor, y: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Cast ``x`` [R, C] in one pass with a scale known before, and again only if it saturates.

    The first launch takes the amax along; the second decides by it, on the device. Nobody else
    sees the amax of this call in between, so the result depends on ``x`` and ``scale`` alone.

    Args:
        x: as for `launch_cast`.
        options: what to make of it; the source is set here.
        scale: 0-dim float32, the decode scale from the history; 0 where unknown.
        amax: 0-dim float32, raised to the amax of what is cast if ``options.record``.
        y: as for `launch_cast`.

    Returns:
        The scale used, and ``(row_data, col_data)``.
    """
    own = torch.zeros((), dtype=torch.float32, device=x.device)
    used = empty((), torch.float32, x.device)
    first = options._replace(source=GIVEN, record=True)
    data = launch_cast(x, first, scale=scale, amax=own, y=y)
    again = options._replace(source=SPECULATIVE, parts=1, repair=True)
    launch_cast(x, again, scale=scale, parts=own, scale_out=used, amax=amax, y=y, out=data)
    return used, data


def launch_config(R: int, C: int, *, across: bool, sms: int) -> TileLaunch:
    """Launch configuration for [R, C], where ``C`` is the dim along which x is contiguous.

    Args:
        R: size of the other dim.
        C: size of the dim along which x is read.
        across: whether the copy that is contiguous along ``R`` is written.
        sms: multiprocessors of the device.
    """
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
    options: Options,
    config: TileLaunch | None,
) -> CastLaunch:
    """Everything about a cast that does not depend on values; cached, as eager mode needs it."""
    (R, C), (stride_r, stride_c) = shape, strides
    row_shape = (ceil16(R) if options.pad_rows else R, ceil16(C)) if options.row else None
    col_shape = (ceil16(C), ceil16(R)) if options.col else None
    swapped = not reads_along_rows(strides)
    if R * C == 0:
        return CastLaunch(None, row_shape, col_shape, swapped)
    row = (_PADDED_ROWS if options.pad_rows else _EXACT_ROWS) if options.row else _ABSENT
    col = _PADDED_ROWS if options.col else _ABSENT
    along, across = row, col
    if swapped:
        R, C, stride_r, stride_c, along, across = C, R, stride_c, stride_r, col, row
    if config is None:
        config = launch_config(R, C, across=across != _ABSENT, sms=sm_count(device))
    constants = (
        options.producer,
        along,
        across,
        3 if options.dtype == torch.float8_e4m3fn else 2,
        FLOAT8_MAX[options.dtype],
        options.source,
        1 << (options.parts - 1).bit_length() if options.parts else 1,
        options.round_to_power_of_2,
        options.record,
        options.repair,
        has_float8_conversion(device),
        config.even,
        config.block_r,
        config.block_c,
        config.group,
    )
    integers = (R, C, stride_r, stride_c, options.parts)
    launch = Launch(
        _cast_kernel,
        repair_programs(config, sm_count(device)) if options.repair else config.programs,
        device,
        integers,
        constants,
        config.num_warps,
        inputs=4 if options.producer != PLAIN else 1,  # x, y, rstd and weight
    )
    return CastLaunch(launch, row_shape, col_shape, swapped)
