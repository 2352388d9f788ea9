"""High precision -> float8 under scales of any granularity, in both layouts that GEMMs read.

One kernel casts a tile of the tensor, in one read; another one holds whole rows, for row data
alone under a scale for each row. A scale of more than a tile is measured first: that of the tensor,
unless it is given, by the kernel of `amax`, those of rows and columns by one that goes down strips.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import CastConfig, Granularity
from float8.formats import E4M3, HIGH_PRECISION_DTYPES, ceil16
from float8.kernels import tiles
from float8.kernels.amax import HIGH_PRECISION, amax_reference, describe, is_dense, measuring
from float8.kernels.numeric import (
    float32_bits,
    magnitude_bits,
    reciprocal,
    rounded_to_bfloat16,
    scale_of_amax,
    to_float8_bits,
    to_float32,
)
from float8.kernels.runtime.launch import Launch, Layout, allocator, takes_triton_directly
from float8.kernels.runtime.ops import cuda, register
from float8.kernels.runtime.private import surely
from float8.kernels.runtime.triton import has_float8_conversion, jit, tl
from float8.kernels.tiles import load, or_zero, store
from float8.scales import DelayedScale, Operand, amax_to_scale


def cast(
    x: Tensor,
    how: CastConfig,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    scale: Tensor | None = None,
    state: DelayedScale | None = None,
    record: bool = True,
    via: torch.dtype | None = None,
    after: Tensor | None = None,
    traced: bool = False,
) -> tuple[Operand | None, Operand | None]:
    """Cast ``x`` to float8, to row data, to column data, or to both.

    Each element is ``x.float() * (1 / scale)`` in float32, saturated to the largest finite value
    of the format and rounded to the nearest, ties to even. An element of ``x`` that is Inf or NaN
    becomes NaN in both formats, and so does a product that is NaN (0 * Inf): the NaN byte is
    always 0x7f. What is not finite spoils what shares a scale that was measured with it. A scale is
    that of the amax of what it covers, by `amax_to_scale`.

    `TENSORWISE`: one scale. `AXISWISE`: row data have a scale per row of ``x``, column data one per
    column. `BLOCK_1x128`: one for each run of 128 elements along the contraction dim, so of a row
    of ``x`` for row data, of a column for column data. `BLOCK_128x128`: one for each square, and
    column data are the transposed bytes and scales of row data. A block that crosses the end of
    ``x`` covers what is there.

    Args:
        x: [R, C] float32, bfloat16 or float16; any strides. Slow, but right, where no dim is
            contiguous.
        how: format, granularity, and whether measured scales are rounded up to powers of two.
        row: whether to return row data.
        col: whether to return column data.
        pad_rows: whether row data have their number of rows padded to a multiple of 16 too, as
            those under blocks always have.
        scale: the one scale, if it is known: one element, float32, on the device of ``x``.
        state: of delayed scaling. Its scale is used, or where it is 0 (unknown) that of ``x``.
        record: whether the amax of ``state`` is raised in place to that of ``x``, in the same read;
            a NaN stays.
        via: ``x`` is rounded to this dtype first. From float32 to bfloat16, under a given scale,
            that takes no pass of its own.
        after: what a compiler must have computed first; not read. What backward makes of a weight
            alone a compiler may move into forward, and keep all the while: a gradient stops it.
        traced: under finer scales cast by plain torch code, which a compiler fuses into what
            produces ``x``, and which may then see the producer's values before they are rounded to
            the dtype of ``x``. Only the transposition of column data is an op of its own; so is the
            whole cast where ``x`` may turn out to be empty, and under blocks where C is no multiple
            of their width, or rows are not contiguous.

    Returns:
        ``(row, col)``, None where not asked for. Row data is [R, C], column data [C, R], the
        transposed copy, both contiguous. They are padded with zeros to multiples of 16: columns of
        both, rows of column data, and of row data if ``pad_rows``; under `BLOCK_1x128` columns to
        128, under `BLOCK_128x128` both to 128. One scale is ``scale``, or a new one, 0-dim. Those
        of rows are [rows, 1]. Those of blocks lie as GEMMs want them: of data [M, K] under
        `BLOCK_1x128` [M, K / 128] with strides (1, M), under `BLOCK_128x128` [M / 128, K / 128],
        contiguous, their second dim padded with zeros to a multiple of 4. Those of padding rows are
        that of amax 0. No gradient flows through it.

    Raises:
        TypeError: the dtype of ``x``, of ``scale`` or of ``state`` is not one of those above.
        ValueError: ``x`` is not 2-D, neither layout is asked for, a scale or a state has not one
            element, is on another device, or comes with finer scales.
    """
    of, dtype, amax = how.scaling_granularity, how.target_dtype or E4M3, None
    if (
        not isinstance(x, Tensor)
        or x.dtype not in HIGH_PRECISION_DTYPES
        or x.dim() != 2
        or not (row or col)
    ):
        raise refusal("cast", x)
    if state is not None:
        scale, amax = state
    for name, scalar in (("scale", scale), ("amax", amax)):
        if scalar is not None and (
            not isinstance(scalar, Tensor)
            or scalar.dtype != torch.float32
            or scalar.numel() != 1
            or scalar.device != x.device
            or not of.one_scale
        ):
            raise refusal_of_scalar(name, scalar, x, of)
    direct = x.is_cuda and takes_triton_directly(x, scale, amax)
    if state is not None:
        delayed = cuda.cast_delayed if direct else torch.ops.float8.cast_delayed.default
        out = delayed(x, scale, amax, dtype, row, col, pad_rows, how.power_of_2, record)
        return Operand(out[1], out[0]) if row else None, Operand(out[2], out[0]) if col else None
    wanted = (scale, of.height, of.width, dtype, row, col, pad_rows, how.power_of_2, via)
    # Nothing gained else, and Inductor's C++ (torch 2.13) drops the last run where it is not whole.
    if of.width is not None:
        traced = traced and x.shape[1] % of.width == 0 and x.stride(1) == 1
    if traced and not of.one_scale and surely(x.numel() != 0):
        out = cast_reference(x.detach(), *wanted)
    else:
        out = (cuda.cast if direct else torch.ops.float8.cast.default)(x, *wanted, after)
    if of.one_scale:
        used = out[0] if scale is None else scale
        return Operand(out[-1 - col], used) if row else None, Operand(
            out[-1], used
        ) if col else None
    return Operand(out[0], out[1]) if row else None, Operand(out[-2], out[-1]) if col else None


def refusal(op: str, x: Any) -> Exception:
    """Return the error of a cast of ``x``, or of one to no layout."""
    if not isinstance(x, Tensor) or x.dtype not in HIGH_PRECISION_DTYPES:
        return TypeError(f"{op}: x is {describe(x)}; expected a {HIGH_PRECISION}")
    if x.dim() != 2:
        return ValueError(
            f"{op}: x is {describe(x)}; expected 2 dimensions [R, C]. "
            f"Flatten the leading dimensions first: x.reshape(-1, x.shape[-1])."
        )
    return ValueError(f"{op}: got row=False, col=False; expected at least one of them True.")


def refusal_of_scalar(name: str, scalar: Any, x: Tensor, of: Granularity) -> Exception:
    """Return the error of a cast of ``x`` under a given scale or amax."""
    got = f"cast: {name} is {describe(scalar)}"
    if not isinstance(scalar, Tensor) or scalar.dtype != torch.float32:
        return TypeError(
            f"{got}; expected a float32 tensor with one element. Convert it first, e.g. "
            f"{name}.to(torch.float32)."
        )
    if not of.one_scale:
        return ValueError(f"{got}; expected none: scales of {of} come from the tensor at hand")
    return ValueError(
        f"{got}; expected one element on {x.device}: that of the whole tensor, where the tensor is"
    )


def layouts(
    shape: tuple[int, ...],
    height: int | None,
    width: int | None,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool = False,
) -> list[Layout | None]:
    """Describe row data and their scales, column data and theirs, of a tensor [R, C].

    None for what is not asked for, and for the one scale of a tensor. Sizes may be symbolic.
    """
    (R, C), made = shape, list[Layout | None]()
    square = (height == width and width) or 16
    for wanted, rows, columns, pads in ((row, R, C, pad_rows), (col, C, R, True)):
        if pads or width is not None:
            rows = _ceil(rows, square)
        columns = _ceil(columns, width or 16)
        scales, strides = (rows, 1), (1, 1)
        if width is not None:  # those of runs lie as those of the transposed tensor
            scales, strides = (rows, columns // width), (1, rows)
        if width is not None and height == width:
            pitch = _ceil(columns // width, 4)
            scales, strides = (rows // width, pitch), (pitch, 1)
        made.append(((rows, columns), (columns, 1), dtype) if wanted else None)
        made.append((scales, strides, torch.float32) if wanted and height is not None else None)
    return made


def _ceil(n: int, to: int) -> int:
    return (n + to - 1) // to * to  # not -(-n // to): torch 2.11 fails on negative symbols


_ONE: Layout = ((), (), torch.float32)


# ---------------------------------------------------------------- plain-torch twins


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast elementwise, by the arithmetic of :func:`cast`; ``scale`` broadcasts against ``x``."""
    # Literals: with dynamic=True, Dynamo makes floats of a module symbolic and then fails on them.
    limit = 448.0 if dtype == torch.float8_e4m3fn else 57344.0
    # By way of float64, which makes the quotient correctly rounded in compiled code too.
    inverse = (1.0 / scale.to(torch.float64)).to(torch.float32)
    v = x.to(torch.float32) * inverse
    # Saturate here and not in the conversion: torch releases differ in what they make of Inf.
    data = v.clamp(-limit, limit).to(dtype).view(torch.uint8)
    # One NaN for all, also in its sign bit, which differs between CPUs and GPUs. As a byte, since a
    # compiler does not see that two expressions with a NaN in them are the same.
    return torch.where(x.isfinite() & ~v.isnan(), data, 0x7F).view(dtype)


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
    """Plain-torch twin: what :func:`cast` returns, but for what was given and is not asked for.

    The scale if there is one and it was not given, and the layouts; or each with its scales. A
    scale covers ``height`` rows and ``width`` columns of row data; None: all.
    """
    x, (R, C) = x.to(via or x.dtype), x.shape
    if height is None:
        made = [] if scale is None else [scale.reshape(())]
        if scale is None:
            made = [amax_to_scale(amax_reference(x), dtype, power_of_2)]
        codes = to_float8(x, made[0], dtype).view(torch.uint8)
        below, right = -R % 16, -C % 16
        if row:
            made.append(F.pad(codes, (0, right, 0, below if pad_rows else 0)).contiguous())
        if col:
            made.append(F.pad(codes.t().contiguous(), (0, below, 0, right)))
        out = [codes.view(dtype) for codes in made[1:]]
        return made[:1] + out if scale is None else out
    # Blocks as `view` takes them: their number and extent down, those across; dims that they span.
    k, R16, C16 = width or 16, (R + 15) // 16 * 16, (C + 15) // 16 * 16
    down, across = (1, R16), (1, C16)
    if width is not None:
        down, across = ((R + k - 1) // k, k), ((C + k - 1) // k, k)
    rows = (R16 if pad_rows or width is not None else R), 1
    casts: list[tuple[Any, ...]] = [((*rows, *across), (3,))] * row + [
        ((*down, C16, 1), (1,))
    ] * col
    square = width is not None and width == height
    if square:
        casts = [((*down, *across), (3, 1))]  # of runs first: that fuses into what produces x
    parts = []
    for blocks, dims in casts:
        Rp, Cp = blocks[0] * blocks[1], blocks[2] * blocks[3]
        pad = (0, Cp - C, 0, Rp - R)
        # A compiler drops what pads by nothing. To ask it here would make it compile again for
        # sizes that need other padding.
        pads = torch.compiler.is_compiling() or pad[1] != 0 or pad[3] != 0
        y = (F.pad(x, pad) if pads else x).view(blocks)
        amax = y
        for dim in dims:
            if amax.shape[dim] == 0:
                amax = amax.sum(dim, keepdim=True, dtype=torch.float32)
            else:
                # In float32 before: one in 16 bits would be two numbers in Inductor's code, rounded
                # where a kernel loads it and not yet rounded in the kernel that takes it. Data
                # would be cast under one scale and multiplied with the other.
                amax = amax.to(torch.float32).abs().amax(dim, keepdim=True)
        own = amax_to_scale(amax, dtype, power_of_2)
        data = to_float8(y, own, dtype).reshape(Rp, Cp)
        if pads:  # once more: next to a NaN a zero has become NaN, too
            data = F.pad(data.view(torch.uint8)[:R, :C], pad).view(dtype)
        parts.append((data.contiguous(), own.squeeze((1, 3))))
    out = []
    if row:
        data, own = parts[0]
        out += [data, own.t().clone(memory_format=torch.contiguous_format).t()]
    if col:
        data, own = parts[-1]
        out += [torch.ops.float8.transpose.default(data, None), own.t()]
    for at in range(1, len(out), 2):
        if square:  # contiguous, padded to 4
            own = F.pad(out[at], (0, -out[at].shape[1] % 4))
            out[at] = own.clone(memory_format=torch.contiguous_format)
        elif width is None:
            out[at] = out[at].flatten().unsqueeze(1)
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
    own = amax_reference(x)
    used, scale = amax_to_scale(own, dtype, power_of_2), scale.reshape(())
    if record:
        amax.copy_(torch.maximum(amax, own))
    used = torch.where(scale == 0.0, used, scale)
    out = cast_reference(x, used, None, None, dtype, row, col, pad_rows)
    absent = x.new_empty((0,))
    return used, out[0] if row else absent, out[-1] if col else absent


def _cast_fake(x: Tensor, scale: Tensor | None, height: int | None, *how: Any) -> list[Tensor]:
    """Uninitialised results of `cast_reference`."""
    made = [_ONE if height is None and scale is None else None]
    made += layouts(x.shape, height, *how[:5])
    return [x.new_empty_strided(*each[:2], dtype=each[2]) for each in made if each is not None]


def _cast_delayed_fake(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, *wanted: Any
) -> tuple[Tensor, ...]:
    # Ops that write an argument must return a fixed number: the compiler's functionalisation takes
    # no list. So there is an empty tensor for a layout that was not asked for.
    along, _, across, _ = layouts(x.shape, None, None, dtype, *wanted[:3])
    made = (each or ((0,), (1,), x.dtype) for each in (_ONE, along, across))
    return tuple(x.new_empty_strided(*each[:2], dtype=each[2]) for each in made)


# ---------------------------------------------------------------- Triton

ONE, LINES, RUNS, SQUARES = range(4)
"""What a scale covers, as the kernel names it: the tensor; rows, or columns; parts of them."""

_COVERS = {(None, None): ONE, (1, None): LINES, (1, 128): RUNS, (128, 128): SQUARES}

GIVEN, MEASURED, HISTORY = range(3)
"""Where the kernel takes one scale from: it is given; measured, from amaxes to be joined; or from
the history, and measured only where that knows none."""

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
    rounded = (x.dtype, via) == (torch.float32, torch.bfloat16) and scale is not None
    if via is not None and not rounded:
        x = x.to(via)
    if x.numel() == 0:
        return cast_reference(x, scale, *wanted)
    source = MEASURED if scale is None and height is None else GIVEN
    made = _run(x, scale, None, source, rounded, *wanted)
    return [each for each in made if each is not None]


def _cast_delayed_triton(
    x: Tensor, scale: Tensor, amax: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return cast_delayed_reference(x, scale, amax, *how)
    *wanted, record = how
    state = scale, amax if record else None
    used, along, _, across, _ = _run(x, *state, HISTORY, False, None, None, *wanted)
    if record:
        torch.autograd.graph.increment_version(amax)  # as PyTorch does
    absent = x.new_empty((0,))
    return used, absent if along is None else along, absent if across is None else across


def _run(
    x: Tensor, scale: Tensor | None, amax: Tensor | None, source: int, rounded: bool, *wanted: Any
) -> tuple[Any, ...]:
    """Return the scale, row data and scales, column data and scales: those that are made."""
    how = source, rounded, amax is not None
    plan = _plan(x.dtype, x.shape, x.stride(), x.device, *how, *wanted)
    if plan is None:
        return _run(x.contiguous(), scale, amax, source, rounded, *wanted)
    make, launch = plan.allocate, plan.cast
    used, parts, along, along_scale, across, across_scale = (
        None if each is None else make(*each) for each in plan.made
    )
    if plan.whole_rows:
        launch(x, along, along_scale)
    else:
        if plan.measure_lines is not None:
            plan.measure_lines(x, parts.zero_())  # type: ignore[union-attr]
        if plan.measure is not None:
            plan.measure(x, parts, scale)
        launch(x, along, along_scale, across, across_scale, scale, parts, used, amax)
    if plan.turned:
        return used, across, across_scale, along, along_scale
    return used, along, along_scale, across, across_scale


class _Plan(NamedTuple):
    """What to allocate and to launch for tensors of one shape, layout, dtype and device."""

    allocate: Callable[..., Tensor]
    made: tuple[Layout | None, ...]
    """The scale, amaxes of parts, data along rows of what the kernel reads and their scales, data
    across and theirs."""
    turned: bool
    """Whether the kernel reads x.t(), so that row data are those across."""
    cast: Launch
    measure: Launch | None = None
    """Of one amax."""
    measure_lines: Launch | None = None
    whole_rows: bool = False


@functools.lru_cache(maxsize=4096)
def _plan(
    element: torch.dtype,
    shape: tuple[int, int],
    strides: tuple[int, int],
    device: torch.device,
    source: int,
    rounded: bool,
    record: bool,
    height: int | None,
    width: int | None,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    power_of_2: bool,
) -> _Plan | None:
    """Plan a cast; None where it needs a contiguous copy."""
    covers, measures = _COVERS.get((height, width)), source != GIVEN
    if covers is None:
        raise ValueError(
            f"cast: got scales of {height} x {width}, expected one of {list(_COVERS)}: there is no "
            f"kernel"
        )
    if measures and not is_dense(shape, strides):
        return None
    (R, C), (stride_r, stride_c) = shape, strides
    made = layouts(shape, height, width, dtype, row, col, pad_rows)
    makes, pads = (row, col), (pad_rows or width is not None, True)
    if turned := stride_c != 1 and stride_r == 1:
        R, C, stride_r, stride_c = C, R, stride_c, stride_r
        made, makes, pads = made[2:] + made[:2], makes[::-1], pads[::-1]
    integers, block = (R, C, stride_r, stride_c), (tiles.ALONG_ALONE, tiles.ALONG_AND_ACROSS)
    shapes = block[makes[1]]
    how = 3 if dtype == E4M3 else 2, power_of_2, has_float8_conversion(device)
    used = parts = measure = measure_lines = None
    joined = 0
    if covers == LINES and not makes[1] and C <= WIDEST_ROW:
        whole = _casting_rows(device, integers, (pads[0], *how))
        return _Plan(allocator(device), (None, None, *made), turned, whole, whole_rows=True)
    if covers == LINES:
        parts = ((R + C,), (1,), torch.int32)
        measure_lines = _measuring_lines(element, device, integers, makes)
        if makes[1]:  # two scales for each element take more registers
            shapes = ((64, 128, 8), *shapes[1:])
    elif covers != ONE:
        # Scales of columns take more registers: fewer, larger threads, which masks would overfill.
        large = covers == RUNS and col and R % 128 == C % 128 == 0
        shapes = ((128, 128, 4 if large else 8),)
    elif measures:
        measure = measuring(R * C, element, device, source == HISTORY)
        joined = measure.programs
        used, parts = _ONE, ((joined,), (1,), torch.float32)
    constants = (
        covers, *makes, *pads, source, 1 << (joined - 1).bit_length() if joined else 1, record,
        rounded, *how,
    )  # fmt: skip
    launch = tiles.tiled(_cast_kernel, shapes, device, (*integers, joined), constants)
    return _Plan(allocator(device), (used, parts, *made), turned, launch, measure, measure_lines)


def _casting_rows(
    device: torch.device, integers: tuple[int, ...], constants: tuple[object, ...]
) -> Launch:
    """Plan the kernel whose programs hold whole rows in registers, of a power of two each."""
    R, C, *_ = integers
    block_c = max(1 << (C - 1).bit_length(), 16)
    rows = max(4096 // block_c, 1)
    num_warps = min(max(rows * block_c // 1024, 1), 16)  # 32 elements a thread
    even = R % max(rows, 16) == 0 and block_c == C
    constants = (*constants, even, rows, block_c)
    return Launch(_cast_rows_kernel, device, -(-ceil16(R) // rows), integers, constants, num_warps)


def _measuring_lines(
    element: torch.dtype, device: torch.device, integers: tuple[int, ...], of: tuple[bool, bool]
) -> Launch:
    """Plan the kernel that measures rows and columns; its programs go down strips."""
    R, C, *_ = integers
    rows, block_c, across = tiles.strips_of(R, C, element, device)
    integers, programs = (*integers, rows), -(-R // rows) * across
    constants = (*of, C % block_c == 0, tiles.STRIP_R, block_c)
    return Launch(_measure_kernel, device, programs, integers, constants, tiles.STRIP_WARPS)


@jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def _cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    along_ptr,  # [rows, Ck]
    along_scale_ptr,  # of LINES [rows], of RUNS [tiles_c, rows], of SQUARES [tiles_r, tiles_c to 4]
    across_ptr,  # [columns, Rk]
    across_scale_ptr,  # likewise
    scale_ptr,
    parts_ptr,  # of ONE [parts] float32; of LINES [R + C] int32: bits of amaxes of rows, of columns
    used_ptr,
    amax_ptr,  # is raised to the amax of x
    R,
    C,
    stride_r,
    stride_c,
    parts,
    COVERS: tl.constexpr,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    PAD_ALONG: tl.constexpr,  # whether rows are padded
    PAD_ACROSS: tl.constexpr,
    SOURCE: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two, not below parts
    RECORD: tl.constexpr,
    ROUNDED: tl.constexpr,  # whether x is rounded to bfloat16 first
    MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    K: tl.constexpr = 128 if COVERS >= 2 else 16  # what contracted dims are padded to
    PAD: tl.constexpr = 128 if COVERS == 3 else 16  # and the others
    Rk, Ck = tl.cdiv(R, K) * K, tl.cdiv(C, K) * K
    rows = tl.cdiv(R, PAD) * PAD if PAD_ALONG else R
    columns = tl.cdiv(C, PAD) * PAD if PAD_ACROSS else C
    tile = tl.program_id(0)
    if COVERS != 1:  # for which measuring went backwards, and left the beginning in the L2 cache
        tile = tiles.tile_of_program()
    R16, C16 = tl.cdiv(R, 16) * 16, tl.cdiv(C, 16) * 16
    tile_r, tile_c = tiles.tile_at(tile, R16, C16, BLOCK_R, BLOCK_C, GROUP)
    quad, c = tiles.quads_of(tile_r, tile_c, BLOCK_R, BLOCK_C)
    r, inside = tiles.rows_of(quad), tiles.inside_of(quad, c, R, C)
    x = tiles.load_rows(x_ptr + c * stride_c, r, stride_r, inside, EVEN)
    v = [to_float32(each, HARDWARE) for each in x]
    element: tl.constexpr = x_ptr.dtype.element_ty
    if ROUNDED:
        v = [rounded_to_bfloat16(each, HARDWARE) for each in v]
    if COVERS == 0:
        scale = choose_scale(scale_ptr, parts_ptr, parts, SOURCE, PARTS, MANTISSA, POWER_OF_2)
        if SOURCE != 0:
            if tl.program_id(0) == 0:
                tl.store(used_ptr, scale)
        if RECORD:
            bits = tl.max(tl.max(tiles.largest_of(x), axis=1), axis=0)
            record_amax(amax_ptr, float32_bits(bits, element))
        v = scaled(v, tl.div_rn(1.0, scale), inside, EVEN)
    if COVERS == 3:
        bits = float32_bits(tl.max(tl.max(tiles.largest_of(x), axis=1), axis=0), element)
        scale = scale_of_amax(bits, MANTISSA, POWER_OF_2, HARDWARE)
        if ALONG:
            store_square(along_scale_ptr, scale, tile_r, tile_c, tl.cdiv(C, 128))
        if ACROSS:
            store_square(across_scale_ptr, scale, tile_c, tile_r, tl.cdiv(R, 128))
        inverse = reciprocal(scale, HARDWARE)
        v = tiles.times(v, (inverse, inverse, inverse, inverse), inside, EVEN)
    if ALONG:  # before ACROSS, which takes more registers
        w = v
        if COVERS == 1 or COVERS == 2:
            if COVERS == 1:
                bits = [load(parts_ptr + each, each < R, EVEN) for each in r]
            else:
                bits = [of_row(each, element) for each in x]
                along_scale_ptr += tile_c.to(tl.int64) * rows
            w, scales = tiles.in_scales(v, bits, inside, MANTISSA, POWER_OF_2, HARDWARE, EVEN)
            if COVERS == 2 or tile_c == 0:
                tiles.store_scales(along_scale_ptr, quad, scales, rows)
        tiles.store_along(along_ptr, w, quad, c, rows, Ck, MANTISSA, HARDWARE, EVEN)
    if ACROSS:
        w = v
        if COVERS == 1 or COVERS == 2:
            if COVERS == 1:
                bits = load(parts_ptr + R + c, c < C, EVEN)
            else:
                bits = float32_bits(tl.max(tiles.largest_of(x), axis=0, keep_dims=True), element)
                across_scale_ptr += tile_r.to(tl.int64) * columns
            scale = scale_of_amax(bits, MANTISSA, POWER_OF_2, HARDWARE)
            if COVERS == 2 or tile_r == 0:
                tl.store(across_scale_ptr + c, scale, mask=c < columns)
            inverse = reciprocal(scale, HARDWARE)
            w = tiles.times(v, (inverse, inverse, inverse, inverse), inside, EVEN)
        tiles.store_across(across_ptr, w, quad, c, columns, Rk, MANTISSA, HARDWARE, EVEN)


@jit
def of_row(x, element: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits of the amax of each row, [rows, 1]."""
    return float32_bits(tl.max(magnitude_bits(x), axis=1, keep_dims=True), element)


@jit
def scaled(v, inverse, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply four float32 by the ``inverse`` of any scale; zero where not ``inside``."""
    # An Inf in v must become NaN, though a product that overflows saturates. Inf * 0 is NaN, and
    # to add a zero of the product's own sign changes nothing else, contracted to an FMA or not.
    zero = (inverse.to(tl.int32, bitcast=True) & -0x80000000).to(tl.float32, bitcast=True)
    return [or_zero(v[i] * inverse + v[i] * zero, inside[i], EVEN) for i in (0, 1, 2, 3)]


@jit
def record_amax(amax_ptr, bits):  # type: ignore[no-untyped-def]
    """Raise the float32 at ``amax_ptr`` to that of these bits."""
    amax_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    # Thousands of programs would queue up for one address, and few of them have news.
    if bits > tl.load(amax_ptr, volatile=True):
        tl.atomic_max(amax_ptr, bits, sem="relaxed")


@jit
def choose_scale(  # type: ignore[no-untyped-def]
    scale_ptr, parts_ptr, parts, SOURCE: tl.constexpr, PARTS: tl.constexpr, MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr,
):  # fmt: skip
    """Choose the decode scale, from where ``SOURCE`` says; see ``GIVEN``."""
    if SOURCE == 1:
        scale = measured_scale(parts_ptr, parts, PARTS, MANTISSA, POWER_OF_2)
    else:
        scale = tl.load(scale_ptr)
        if SOURCE == 2:
            if scale == 0.0:
                scale = measured_scale(parts_ptr, parts, PARTS, MANTISSA, POWER_OF_2)
    return scale


@jit
def measured_scale(  # type: ignore[no-untyped-def]
    parts_ptr, parts, PARTS: tl.constexpr, MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr
):
    """Return the scale of the largest of some amaxes."""
    at = tl.arange(0, PARTS)
    parts_ptr = parts_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    bits = tl.max(tl.load(parts_ptr + at, mask=at < parts, other=0))
    return scale_of_amax(bits, MANTISSA, POWER_OF_2)


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


@jit
def _cast_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    data_ptr,  # [rows, C padded to 16]
    scale_ptr,  # [rows]
    R,
    C,
    stride_r,
    stride_c,
    PAD: tl.constexpr,  # whether rows are padded
    MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows, Cp = tl.cdiv(R, 16) * 16 if PAD else R, tl.cdiv(C, 16) * 16
    # 64-bit, so that offsets are.
    r = (tiles.tile_of_program() * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    inside = (r < R) & (c < C)
    x = load(x_ptr + r * stride_r + c.to(tl.int64) * stride_c, inside, EVEN)
    scale = scale_of_amax(of_row(x, x.dtype), MANTISSA, POWER_OF_2, HARDWARE)
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
    walk = tiles.tile_of_program()
    begin = walk // across * rows
    end = tl.minimum(begin + rows, R)
    tiles.measure_strip(
        x_ptr, amax_ptr, amax_ptr + R, begin, end, walk % across, C, stride_r, stride_c,
        OF_ROWS, OF_COLUMNS, False, EVEN, BLOCK_R, BLOCK_C,
    )  # fmt: skip


register("cast", cast_reference, triton=_cast_triton, fake=_cast_fake)
register(
    "cast_delayed",
    cast_delayed_reference,
    triton=_cast_delayed_triton,
    fake=_cast_delayed_fake,
    writes=("amax",),
)
