"""High precision -> float8 under scales of any granularity, in both layouts that GEMMs read.

One kernel casts a tile of the tensor, in one read; another one holds whole rows, for row data
alone under a scale for each row. A scale of more than a tile is measured first: that of the tensor,
unless it is given, by the kernel of `amax`, those of rows and columns by one that goes down strips.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import CastConfig
from float8.formats import E4M3, HIGH_PRECISION_DTYPES, ceil16
from float8.kernels import cast_kernels, tiles
from float8.kernels.amax import HIGH_PRECISION, amax_reference, describe, is_dense, measuring
from float8.kernels.runtime.launch import Launch, Spec, allocator, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.private import surely
from float8.kernels.runtime.triton import has_float8_conversion
from float8.scales import (
    DelayedScale,
    Operand,
    amax_to_exponent,
    amax_to_scale,
    inverse_of_exponent,
)


def cast(
    x: Tensor,
    how: CastConfig,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    scale: Tensor | None = None,
    state: DelayedScale | None = None,
    record: bool = False,
    via: torch.dtype | None = None,
    after: Tensor | None = None,
    traced: bool = False,
) -> tuple[Operand | None, Operand | None]:
    """Cast ``x`` [R, C] to float8: to row data, to column data, or to both; ``(row, col)``.

    Each element is ``x.float() * (1 / scale)`` in float32, saturated to the largest finite value
    of the format and rounded to the nearest, ties to even. What is not finite, or 0 * Inf, becomes
    NaN, whose byte is always 0x7f. A scale is that of the amax of what it covers, unless there is
    one that is given, or known to ``state`` (not 0). ``record``: raise the amax of ``state``.

    Row data are [R, C], column data [C, R], padded with zeros to multiples of 16 (rows of row data
    with ``pad_rows`` alone); columns to the width of blocks, under squares both. Scales have the
    shapes of `Granularity.scales`, strides (1, M) under runs. Where they are 8-bit exponents Inf
    becomes the largest value under 2**127, and NaN spoils its block.

    ``x`` is rounded to ``via`` first: from float32 to bfloat16 under a given scale without another
    pass. ``after`` is what a compiler must have computed first: it may move what backward makes of
    a weight alone into forward, and keep it; ``after``, a gradient, stops it.

    ``traced`` casts finer scales by plain torch code, which a compiler fuses into what produces
    ``x``, and which may see its values before they are rounded to the dtype of ``x``. The op runs
    instead if ``x`` may be empty, and under blocks if C is not a multiple of the block width, or
    rows are not contiguous.
    """
    if x.dtype not in HIGH_PRECISION_DTYPES or x.dim() != 2 or not (row or col):
        raise refusal(x)
    covers, amax = how.scaling_granularity, None
    if state is not None:
        scale, amax = state
    for one in (scale, amax):
        if one is None:
            continue
        fits = one.dtype == torch.float32 and one.numel() == 1 and one.device == x.device
        if not (fits and covers.one_scale):
            expected = f"one float32 element on {x.device}"
            if not covers.one_scale:
                expected = f"none: scales of {covers} come from the tensor at hand"
            raise ValueError(f"cast: scale is {describe(one)}; expected {expected}")
    direct = x.is_cuda and takes_triton_directly(x, scale, amax)
    wanted = row, col, pad_rows, how.power_of_2
    if state is not None:
        delayed = _cast_delayed_triton if direct else torch.ops.float8.cast_delayed.default
        used, row_data, col_data = delayed(x, scale, amax, how.dtype, *wanted, record)
        return Operand(row_data, used) if row else None, Operand(col_data, used) if col else None
    if covers.width is not None:
        # Nothing gained, and Inductor's C++ (torch 2.13) drops the last run where it is not whole.
        traced = traced and x.shape[1] % covers.width == 0 and x.stride(1) == 1
    arguments = scale, covers.height, covers.width, how.dtype, *wanted, via
    if traced and not covers.one_scale and surely(x.numel() != 0):
        out = cast_reference(x.detach(), *arguments)
    else:
        out = (_cast_triton if direct else torch.ops.float8.cast.default)(x, *arguments, after)
    if covers.one_scale:
        used, *data = out if scale is None else (scale, *out)
        return Operand(data[0], used) if row else None, Operand(data[-1], used) if col else None
    return Operand(*out[:2]) if row else None, Operand(*out[-2:]) if col else None


def refusal(x: Tensor) -> Exception:
    """Return the error of a cast of ``x`` that no kernel can do, or to no layout."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        return TypeError(f"cast: x is {describe(x)}; expected a {HIGH_PRECISION}")
    if x.dim() != 2:
        expected = "2 dimensions: x.reshape(-1, x.shape[-1])"
        return ValueError(f"cast: x is {describe(x)}; expected {expected}")
    return ValueError("cast: got row=False, col=False; expected at least one of them True")


# ---------------------------------------------------------------- plain-torch twins


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype, exponents: bool = False) -> Tensor:
    """Cast elementwise, by the arithmetic of :func:`cast`; ``scale`` broadcasts against ``x``."""
    # Literals: with dynamic=True, Dynamo makes floats of a module symbolic and then fails on them.
    limit = 448.0 if dtype == torch.float8_e4m3fn else 57344.0
    # By way of float64, which makes the quotient correctly rounded in compiled code too.
    exact = inverse_of_exponent(scale) if exponents else 1.0 / scale.to(torch.float64)
    v = x.to(torch.float32) * exact.to(torch.float32)
    # Saturate here and not in the conversion: torch releases differ in what they make of Inf.
    data = v.clamp(-limit, limit).to(dtype).view(torch.uint8)
    if v.is_cpu and not torch.compiler.is_compiling() and v.sum().isfinite():
        return data.view(dtype)
    # One NaN for all, also in its sign bit, which differs between CPUs and GPUs. As a byte, since a
    # compiler does not see that two expressions with a NaN in them are the same.
    number = ~v.isnan() if exponents else x.isfinite() & ~v.isnan()
    return torch.where(number, data, 0x7F).view(dtype)


def cast_reference(
    x: Tensor,
    scale: Tensor | None,
    height: int | None,
    width: int | None,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    power_of_2: bool = False,
    via: torch.dtype | None = None,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Plain-torch twin; a scale covers ``height`` x ``width`` elements of row data, None: all.

    Returns the one scale, unless it was given, and the layouts; or each layout with its scales.
    """
    x, (R, C) = x.to(via or x.dtype), x.shape
    if height is None:
        out, below, right = [], -R % 16, -C % 16
        if scale is None:
            scale = amax_to_scale(amax_reference(x), dtype, power_of_2)
            out = [scale]
        codes = to_float8(x, scale.reshape(()), dtype).view(torch.uint8)
        if row:
            pads = (0, right, 0, below if pad_rows else 0)
            out.append(F.pad(codes, pads).contiguous().view(dtype))
        if col:
            out.append(F.pad(codes.t().contiguous(), (0, below, 0, right)).view(dtype))
        return out
    # Blocks as `view` takes them: their number and extent down, those across; dims that they span.
    k, R16, C16 = width or 16, (R + 15) // 16 * 16, (C + 15) // 16 * 16
    down, across = (1, R16), (1, C16)
    if width is not None:
        down, across = ((R + k - 1) // k, k), ((C + k - 1) // k, k)
    rows = (R16 if pad_rows or width is not None else R), 1
    views: list[tuple[Any, Any]] = [((*rows, *across), (3,))] * row
    views += [((*down, C16, 1), (1,))] * col
    if square := width is not None and width == height:
        views = [((*down, *across), (3, 1))]  # of runs first: that fuses into what produces x
    made, out = [], []
    for blocks, dims in views:
        Rp, Cp = blocks[0] * blocks[1], blocks[2] * blocks[3]
        pad = (0, Cp - C, 0, Rp - R)
        # A compiler drops what pads by nothing. To ask it here would make it compile again for
        # sizes that need other padding.
        differs = torch.compiler.is_compiling() or pad[1] != 0 or pad[3] != 0
        y = (F.pad(x, pad) if differs else x).view(blocks)
        amax = y
        for dim in dims:
            if amax.shape[dim] == 0:
                amax = amax.sum(dim, keepdim=True, dtype=torch.float32)
            else:
                # In float32 before: one in 16 bits would be two numbers in Inductor's code, rounded
                # where a kernel loads it and not yet rounded in the kernel that takes it. Data
                # would be cast under one scale and multiplied with the other.
                amax = amax.to(torch.float32).abs().amax(dim, keepdim=True)
        exponents = width == 32
        s = amax_to_exponent(amax, dtype) if exponents else amax_to_scale(amax, dtype, power_of_2)
        data = to_float8(y, s, dtype, exponents).reshape(Rp, Cp)
        if differs:  # once more: next to a NaN a zero has become NaN, too
            data = F.pad(data.view(torch.uint8)[:R, :C], pad).view(dtype)
        made.append((data.contiguous(), s.squeeze((1, 3))))
    for wanted, transposed, (data, s) in ((row, False, made[0]), (col, True, made[-1])):
        if not wanted:
            continue
        if transposed:
            data, s = torch.ops.float8.transpose.default(data, None), s.t()
        if square:
            s = F.pad(s, (0, -s.shape[1] % 4)).clone(memory_format=torch.contiguous_format)
        elif width is None:
            s = s.flatten().unsqueeze(1)
        elif not transposed:
            s = s.t().clone(memory_format=torch.contiguous_format).t()
        out += [data, s]
    return out


def cast_delayed_reference(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    power_of_2: bool,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain-torch twin under a state: the scale that was used, row data, column data."""
    current = amax_reference(x)
    used, scale = amax_to_scale(current, dtype, power_of_2), scale.reshape(())
    if record:
        amax.copy_(torch.maximum(amax, current))
    used = torch.where(scale == 0.0, used, scale)
    out = cast_reference(x, used, None, None, dtype, row, col, pad_rows)
    absent = x.new_empty((0,))
    return used, out[0] if row else absent, out[-1] if col else absent


def _specs(shape: tuple[int, ...], *how: Any) -> list[Spec | None]:
    """Describe row data and their scales, column data and theirs; None for what is not made.

    The one scale of a tensor is not among them. Sizes may be symbolic.
    """
    height, width, dtype, row, col, pad_rows, *_ = how
    (R, C), made = shape, list[Spec | None]()
    for wanted, rows, columns, pads in ((row, R, C, pad_rows), (col, C, R, True)):
        if pads or width is not None:
            rows = _ceil(rows, (height == width and width) or 16)
        columns = _ceil(columns, width or 16)
        scales, strides = (rows, 1), (1, 1)
        if width is not None and height == width:
            pitch = _ceil(columns // width, 4)
            scales, strides = (rows // width, pitch), (pitch, 1)
        elif width is not None:  # as those of the transposed tensor
            scales, strides = (rows, columns // width), (1, rows)
        made.append(((rows, columns), (columns, 1), dtype) if wanted else None)
        made.append((scales, strides, torch.float32) if wanted and height is not None else None)
    return made


def _ceil(n: int, to: int) -> int:
    return (n + to - 1) // to * to  # not -(-n // to): torch 2.11 fails on negative symbols


_ONE: Spec = ((), (), torch.float32)


def _cast_fake(x: Tensor, scale: Tensor | None, *wanted: Any) -> list[Tensor]:
    specs = _specs(x.shape, *wanted, False)  # the default of `pad_rows`
    made = [_ONE if wanted[0] is None and scale is None else None, *specs]
    return [x.new_empty_strided(*each[:2], dtype=each[2]) for each in made if each is not None]


def _cast_delayed_fake(x: Tensor, scale: Tensor, amax: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    # Ops that write an argument must return a fixed number: the compiler's functionalisation takes
    # no list. So there is an empty tensor for a layout that was not asked for.
    row, _, col, _ = _specs(x.shape, None, None, *rest)
    made = (each or ((0,), (1,), x.dtype) for each in (_ONE, row, col))
    return tuple(x.new_empty_strided(*each[:2], dtype=each[2]) for each in made)


# ---------------------------------------------------------------- Triton

WIDEST_ROW = 32768
"""Programs hold rows of up to this many elements in registers; longer ones are read twice."""


def _cast_triton(
    x: Tensor,
    scale: Tensor | None,
    height: int | None,
    width: int | None,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    power_of_2: bool = False,
    via: torch.dtype | None = None,
    after: Tensor | None = None,
) -> list[Tensor]:
    wanted = height, width, dtype, row, col, pad_rows, power_of_2
    rounded = scale is not None and (x.dtype, via) == (torch.float32, torch.bfloat16)
    if via is not None and not rounded:  # the kernel rounds no others
        x = x.to(via)
    if x.numel() == 0:
        return cast_reference(x, scale, *wanted)
    source = cast_kernels.MEASURED if scale is None and height is None else cast_kernels.GIVEN
    launch = _launching(x.dtype, x.shape, x.stride(), x.device, source, rounded, False, *wanted)
    return [made for made in launch(x, scale, None) if made is not None]


def _cast_delayed_triton(x: Tensor, scale: Any, amax: Any, *rest: Any) -> tuple[Tensor, ...]:
    if x.numel() == 0:
        return cast_delayed_reference(x, scale, amax, *rest)
    *wanted, record = None, None, *rest
    about = x.dtype, x.shape, x.stride(), x.device
    launch = _launching(*about, cast_kernels.HISTORY, False, record, *wanted)
    used, row, _, col, _ = launch(x, scale, amax if record else None)
    if record:
        torch.autograd.graph.increment_version(amax)  # as PyTorch does
    row = x.new_empty((0,)) if row is None else row
    col = x.new_empty((0,)) if col is None else col
    return used, row, col


@functools.lru_cache(maxsize=4096)
def _launching(
    element: torch.dtype,
    shape: tuple[int, int],
    strides: tuple[int, int],
    device: torch.device,
    source: int,
    rounded: bool,
    record: bool,
    *wanted: Any,
) -> Callable[..., tuple[Any, ...]]:
    """Return what casts tensors of one kind: a function of a tensor, a scale and an amax.

    It returns the scale if it finds that, then what `_specs` describes.
    """
    height, width, dtype, row, col, pad_rows, power_of_2 = wanted
    covers = cast_kernels.BLOCKS[height, width]
    if source != cast_kernels.GIVEN and not is_dense(shape, strides):
        dense = (shape[1], 1)
        of_dense = _launching(element, shape, dense, device, source, rounded, record, *wanted)
        return lambda x, *state: of_dense(x.contiguous(), *state)
    (R, C), (stride_r, stride_c) = shape, strides
    made = _specs(shape, *wanted)
    makes, pads = (row, col), (pad_rows or width is not None, True)
    if transposed := stride_c != 1 and stride_r == 1:  # the kernel reads x.t()
        R, C, stride_r, stride_c = C, R, stride_c, stride_r
        makes, pads = makes[::-1], pads[::-1]
    make, integers = allocator(device), (R, C, stride_r, stride_c)
    rounding = 2 if width == 32 else int(power_of_2)
    arithmetic = 3 if dtype == E4M3 else 2, rounding, has_float8_conversion(device)
    measure, amaxes_spec, count = None, None, 0
    shapes = tiles.ALONG_AND_ACROSS if makes[1] else tiles.ALONG_ALONE
    # Triton 3.6 specialises on C == 1, and then pads wrongly.
    if whole_rows := covers == cast_kernels.ROWS and not makes[1] and 1 < C <= WIDEST_ROW:
        block_c = max(1 << (C - 1).bit_length(), 16)
        rows = max(4096 // block_c, 1)
        even = R % max(rows, 16) == 0 and block_c == C
        num_warps = min(max(rows * block_c // 1024, 1), 16)  # 32 elements a thread
        kernel, programs = cast_kernels.cast_rows_kernel, -(-ceil16(R) // rows)
        settings = (pads[0], *arithmetic, even, rows, block_c)
        cast = Launch(kernel, device, programs, integers, settings, num_warps)
    elif covers == cast_kernels.ROWS:
        rows, block_c, strips = tiles.strips_of(R, C, element, device)
        kernel, programs = cast_kernels.measure_kernel, -(-R // rows) * strips
        sizes, constants = (*integers, rows), (*makes, C % block_c == 0, tiles.STRIP_R, block_c)
        measure = Launch(kernel, device, programs, sizes, constants, tiles.STRIP_WARPS)
        amaxes_spec = (R + C,), (1,), torch.int32
        if makes[1]:  # two scales for each element take more registers
            shapes = ((64, 128, 8), *shapes[1:])
    elif covers == cast_kernels.RUNS and width == 32:  # of which a thread has many scales
        shapes = ((64, 64, 2),)
    elif covers != cast_kernels.ONE:
        # Scales of columns: fewer threads with more registers each; with masks they would spill.
        large = covers == cast_kernels.RUNS and col and R % 128 == C % 128 == 0
        shapes = ((128, 128, 4 if large else 8),)
    elif source != cast_kernels.GIVEN:
        measure = measuring(R * C, element, device, source == cast_kernels.HISTORY)
        count = measure.programs
        amaxes_spec = (count,), (1,), torch.float32
    if not whole_rows:
        counted = 1 << max(count - 1, 0).bit_length()
        how = (covers, width or 1, *makes, *pads, source, counted, record, rounded, *arithmetic)
        cast = tiles.tiled(cast_kernels.cast_kernel, shapes, device, (*integers, count), how)

    def launch(x: Tensor, scale: Tensor | None, amax: Tensor | None) -> tuple[Any, ...]:
        data, used, amaxes = [each and make(*each) for each in made], None, None
        if amaxes_spec is not None and measure is not None:
            amaxes = make(*amaxes_spec)
            if covers == cast_kernels.ROWS:
                measure(x, amaxes.zero_())
            else:
                used = make(*_ONE)
                measure(x, amaxes, scale)
        written = data[2:] + data[:2] if transposed else data  # along, then across
        if whole_rows:
            cast(x, *written[:2])
        else:
            cast(x, *written, scale, amaxes, used, amax)
        return used, *data

    return launch


register("cast", cast_reference, triton=_cast_triton, fake=_cast_fake)
register(
    "cast_delayed",
    cast_delayed_reference,
    triton=_cast_delayed_triton,
    fake=_cast_delayed_fake,
    writes=("amax",),
)
