"""Casts of high-precision tensors to float8 row and column data, under scales of any granularity.

On GPUs `cast_kernel` casts a tensor tile by tile, or `cast_rows_kernel` row by row; the latter only
row data with a scale per row, of rows that fit registers. If `cast_kernel` computes scales of more
than a tile, another kernel first measures amaxes: that of `amax` for one, else `measure_kernel`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import CastConfig, Granularity
from float8.formats import E4M3, HIGH_PRECISION_DTYPES, ceil16
from float8.kernels import cast_kernels, tiles
from float8.kernels.amax import HIGH_PRECISION, amax_plan, amax_reference, describe, is_dense
from float8.kernels.runtime.launch import Launch, Spec, allocator, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.private import surely
from float8.kernels.runtime.triton import has_float8_conversion
from float8.scales import Operand, amax_to_exponent, amax_to_scale, inverse_of_exponent


class CastArguments(NamedTuple):
    """Arguments of `torch.ops.float8.cast` except the tensors ``x``, ``scale`` and ``after``."""

    height: int | None  # rows and columns of a block that shares a scale; None for a whole dim
    width: int | None
    dtype: torch.dtype
    row: bool  # return row data
    col: bool  # return column data (the transposed copy)
    pad_rows: bool = False  # zero-pad rows of row data, as always under block scales
    power_of_2: bool = False  # round scales up to powers of two
    via: torch.dtype | None = None  # round `x` to this dtype before the cast


def cast(
    x: Tensor,
    cast_config: CastConfig,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    scale: Tensor | None = None,
    via: torch.dtype | None = None,
    after: Tensor | None = None,
    traced: bool = False,
) -> tuple[Operand | None, Operand | None]:
    """Cast ``x`` [R, C] to float8 and return row data, column data (the transposed copy), or both.

    Row data are [R, C], column data [C, R]; each has scales of its own if these are finer than one
    per tensor. Each is returned as an `Operand` (data, scale), or None if not requested. Elements
    become ``x.float() * (1 / scale)`` in float32, saturated to the largest finite value of the
    format and rounded to nearest even. Non-finite elements, and 0 if 1 / scale is Inf, become NaN,
    the byte 0x7f. If scales are 8-bit exponents (MXFP8), Inf saturates under scale 2**127, a block
    with a NaN is all NaN, one with scale 2**-127 all 0. Scales of 1 x k blocks are column-major.

    Args:
        x: float32, bfloat16 or float16, else raises `TypeError`; of any strides; gets no gradient.
            Raises `ValueError` if it is not 2-D, or if ``row`` and ``col`` are False.
        cast_config: the format, the granularity, and whether scales are powers of two.
        row: return row data, with columns zero-padded to a multiple of the block width, or of 16
            without block scales. Under block scales, rows are zero-padded to a multiple of 16 or,
            if blocks are square, of their side; without block scales, only if ``pad_rows``.
        col: return column data, zero-padded like row data with ``pad_rows``.
        pad_rows: without block scales, zero-pad rows of row data to a multiple of 16.
        scale: one float32 element on the device of ``x``, used instead of a scale from its amax.
            Other tensors raise `ValueError`; so does any if ``cast_config`` has finer scales.
        via: round ``x`` to this dtype first. On GPUs, the kernel that casts does so if ``scale`` is
            given, ``x`` is float32 and ``via`` is bfloat16; else ``x.to(via)`` runs before it.
        after: a tensor that compiled code must compute before this cast. Backward passes the scale
            of grad_output, so that a compiler cannot move the cast of a weight into forward.
        traced: use torch ops, without ``after``. Inductor fuses them into code that computes ``x``
            and may read values not yet rounded to ``x.dtype``. Ignored if one scale covers ``x``,
            if ``x`` may be empty, and under blocks unless their width divides C and stride(1) is 1.
    """
    if x.dtype not in HIGH_PRECISION_DTYPES or x.dim() != 2 or not (row or col):
        raise refusal(x)
    granularity = cast_config.scaling_granularity
    if scale is not None:
        fits = scale.dtype == torch.float32 and scale.numel() == 1 and scale.device == x.device
        if not (fits and granularity.one_scale):
            raise refused_scale(scale, x, granularity)
    if granularity.width is not None:
        # Other layouts gain nothing, and Inductor's C++ (torch 2.13) drops a last partial block.
        traced = traced and x.shape[1] % granularity.width == 0 and x.stride(1) == 1
    layout = row, col, pad_rows, cast_config.power_of_2, via
    arguments = CastArguments(granularity.height, granularity.width, cast_config.dtype, *layout)
    if traced and not granularity.one_scale and surely(x.numel() != 0):
        out = cast_reference(x.detach(), scale, *arguments)
    elif x.is_cuda and takes_triton_directly(x, scale):
        out = _cast_triton(x, scale, arguments)
    else:
        out = torch.ops.float8.cast.default(x, scale, *arguments, after)
    if granularity.one_scale:
        used, *data = out if scale is None else (scale, *out)  # data: row, column or both
        return Operand(data[0], used) if row else None, Operand(data[-1], used) if col else None
    return Operand(*out[:2]) if row else None, Operand(*out[-2:]) if col else None


def refusal(x: Tensor) -> Exception:
    """Return the error for `x` of a wrong dtype or not 2-D; else for neither `row` nor `col`."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        return TypeError(f"cast: x is {describe(x)}; expected a {HIGH_PRECISION}")
    if x.dim() != 2:
        expected = "2 dimensions: x.reshape(-1, x.shape[-1])"
        return ValueError(f"cast: x is {describe(x)}; expected {expected}")
    return ValueError("cast: got row=False, col=False; expected at least one of them True")


def refused_scale(scale: Tensor, x: Tensor, granularity: Granularity) -> ValueError:
    """Return the error for a ``scale`` that is not one float32 element on the device of ``x``.

    If ``granularity`` has more than one scale per tensor, the text says to pass no scale at all.
    """
    expected = f"one float32 element on {x.device}"
    if not granularity.one_scale:
        expected = f"none: scales of {granularity} are computed from x; leave the scale out"
    return ValueError(f"cast: scale is {describe(scale)}; expected {expected}")


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype, exponents: bool = False) -> Tensor:
    """Return ``x * (1 / scale)`` in float8 ``dtype``, saturated and rounded to nearest even.

    ``scale`` is float32 and broadcasts to ``x``. Inf and NaN become NaN, the byte 0x7f. If
    ``exponents``, the scales are those of MXFP8, powers of two from 2**-127 to 2**127: then Inf
    saturates, and 1 / 2**-127 counts as 1: elements tiny enough for that scale round to zero.
    """
    # Literals: with dynamic=True, Dynamo makes floats of a module symbolic and then fails on them.
    limit = 448.0 if dtype == torch.float8_e4m3fn else 57344.0
    # A division in float64 makes the float32 inverse correctly rounded in compiled code, too.
    inverse = inverse_of_exponent(scale) if exponents else 1.0 / scale.to(torch.float64)
    scaled = x.to(torch.float32) * inverse.to(torch.float32)
    # Saturate here and not in the conversion: torch releases differ in how they convert Inf.
    codes = scaled.clamp(-limit, limit).to(dtype).view(torch.uint8)
    if scaled.is_cpu and not torch.compiler.is_compiling() and scaled.sum().isfinite():
        return codes.view(dtype)  # no Inf or NaN to replace; on a GPU this test would sync
    # Write 0x7F for every NaN, since CPUs and GPUs differ in its sign; as uint8, since compilers do
    # not merge equal float8 expressions with a NaN. An Inf becomes NaN, too, unless ``exponents``.
    is_number = ~scaled.isnan() if exponents else x.isfinite() & ~scaled.isnan()
    return torch.where(is_number, codes, 0x7F).view(dtype)


def cast_reference(
    x: Tensor, scale: Tensor | None, *flat: Any, after: Tensor | None = None, **named: Any
) -> list[Tensor]:
    """Cast ``x`` [R, C] to float8 by plain PyTorch ops: the op `torch.ops.float8.cast` on CPUs.

    ``flat`` and ``named`` are fields of `CastArguments` (block shape, dtype, results); ``after`` is
    ignored. Returns what is requested of row data, row scales, column data (transposed), scales.
    If one scale covers ``x``, it comes first instead, or is left out if passed as ``scale``.
    """
    arguments = CastArguments(*flat[: len(CastArguments._fields)], **named)
    height, width, dtype, row, col, pad_rows, power_of_2, via = arguments
    x, (R, C) = x.to(via or x.dtype), x.shape
    if height is None:
        out, below, right = [], -R % 16, -C % 16
        if scale is None:
            scale = amax_to_scale(amax_reference(x), dtype, power_of_2)
            out = [scale]
        codes = to_float8(x, scale.reshape(()), dtype).view(torch.uint8)
        if row:
            padded = F.pad(codes, (0, right, 0, below if pad_rows else 0))
            out.append(padded.contiguous().view(dtype))
        if col:
            out.append(F.pad(codes.t().contiguous(), (0, below, 0, right)).view(dtype))
        return out
    # Column data are the row data of x.t(), quantized in the memory order of x. Squares are equal
    # in both layouts and quantized once.
    square, e8m0, quantized, out = height == width, width == 32, [], []  # e8m0: 8-bit exponents
    for requested, transposed in ((row or square, False), (col and not square, True)):
        if not requested:
            continue
        row_multiple = (height if square else 16) if pad_rows or transposed or width else 1
        multiples = row_multiple, width or 16  # of the rows and columns of this layout
        r, c = multiples[::-1] if transposed else multiples  # R is padded to r, C to c
        right, below = (C + c - 1) // c * c - C, (R + r - 1) // r * r - R
        # Compiled code always pads: a compiler removes padding by 0, while a test of sizes would
        # make it compile again for sizes that need other padding.
        pads = torch.compiler.is_compiling() or right != 0 or below != 0
        padded = F.pad(x, (0, right, 0, below)) if pads else x
        matrix = padded.t() if transposed else padded
        Rp, Cp = matrix.shape
        blocks = matrix.view(Rp // height, height, Cp // width if width else 1, width or Cp)
        amax = blocks
        for dim in (3, 1) if square else (3,):  # dim 3 first: that fuses into the producer of x
            if amax.shape[dim] == 0:
                amax = amax.sum(dim, keepdim=True, dtype=torch.float32)
            else:
                # To float32 first: Inductor would compute a 16-bit amax twice, once rounded by a
                # store and once not: data would be cast under one scale, multiplied with the other.
                amax = amax.to(torch.float32).abs().amax(dim, keepdim=True)
        scales = amax_to_exponent(amax, dtype) if e8m0 else amax_to_scale(amax, dtype, power_of_2)
        data = to_float8(blocks, scales, dtype, exponents=e8m0).reshape(Rp, Cp)
        data = data.t() if transposed else data  # in the layout of x
        if pads:  # again, since a zero in a block with a NaN has become NaN
            data = F.pad(data.view(torch.uint8)[:R, :C], (0, right, 0, below)).view(dtype)
        quantized.append((data.contiguous(), scales.squeeze((1, 3))))
    layouts = (row, False, quantized[0]), (col, True, quantized[-1])  # squares have one entry
    for requested, transposed, (data, scales) in layouts:
        if not requested:
            continue
        if transposed:
            data = torch.ops.float8.transpose.default(data, None)
        if square:
            scales = scales.t() if transposed else scales
            padded = F.pad(scales, (0, -scales.shape[1] % 4))
            scales = padded.clone(memory_format=torch.contiguous_format)
        elif width is None:
            scales = scales.flatten().unsqueeze(1)
        else:  # column-major
            scales = scales.t().clone(memory_format=torch.contiguous_format).t()
        out += [data, scales]
    return out


def specs_of(shape: tuple[int, ...], arguments: CastArguments) -> list[Spec | None]:
    """Return (shape, strides, dtype) of a cast's results, or None for those that do not exist.

    The list has row data, row scales, column data (the transposed copy), column scales. Scales do
    not exist if one covers the tensor. ``shape`` is that of the tensor to cast; may be symbolic.
    """
    height, width, dtype, row, col, pad_rows, *_ = arguments
    (R, C), specs = shape, list[Spec | None]()
    side = width if height == width else None  # of square blocks, else None
    for requested, rows, columns, pads_rows in ((row, R, C, pad_rows), (col, C, R, True)):
        if pads_rows or width is not None:
            rows = _round_up(rows, side or 16)
        columns = _round_up(columns, width or 16)
        sizes, strides = (rows, 1), (1, 1)  # of the scales, if each row has one
        if side is not None:
            pitch = _round_up(columns // side, 4)  # cuBLASLt needs a multiple of 4
            sizes, strides = (rows // side, pitch), (pitch, 1)
        elif width is not None:  # column-major
            sizes, strides = (rows, columns // width), (1, rows)
        specs.append(((rows, columns), (columns, 1), dtype) if requested else None)
        specs.append((sizes, strides, torch.float32) if requested and height is not None else None)
    return specs


def _round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple  # torch 2.11 fails on -(-n // m) of symbols


SCALAR: Spec = ((), (), torch.float32)


def _arguments(*flat: Any, after: Tensor | None = None, **named: Any) -> CastArguments:
    return CastArguments(*flat[: len(CastArguments._fields)], **named)  # without `after`


def _cast_fake(x: Tensor, scale: Tensor | None, *flat: Any) -> list[Tensor]:
    arguments = _arguments(*flat)
    scale_spec = SCALAR if arguments.height is None and scale is None else None
    specs = (scale_spec, *specs_of(x.shape, arguments))
    return [x.new_empty_strided(*spec[:2], dtype=spec[2]) for spec in specs if spec is not None]


WIDEST_ROW = 32768
"""The longest row, in elements, that a program holds in registers; longer rows are read twice."""


def _cast_triton(x: Tensor, scale: Tensor | None, arguments: CastArguments) -> list[Tensor]:
    from_and_via = x.dtype, arguments.via
    if arguments.via and (scale is None or from_and_via != (torch.float32, torch.bfloat16)):
        x, arguments = x.to(arguments.via), arguments._replace(via=None)  # else the kernel rounds
    if x.numel() == 0:
        return cast_reference(x, scale, *arguments)
    source = "measured" if scale is None and arguments.height is None else "given"
    launch = cast_plan(x.dtype, x.shape, x.stride(), x.device, source, arguments)
    return [result for result in launch(x, scale, None) if result is not None]


class _Matrix(NamedTuple):
    """The matrix that a kernel reads, `x` or `x.t()`, and how it is cast to row and column data."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, int, int, int]  # R, C and their strides
    row: bool
    col: bool
    pad_rows: bool  # whether R is padded in row data
    pad_cols: bool  # whether C is padded in column data
    rounded: bool  # whether `x` is rounded to bfloat16 first
    arithmetic: tuple[int, int, bool]  # mantissa bits, rounding of scales, conversion by the GPU


_Kernels = tuple[Launch, Launch | None, Spec | None]
"""The launch that casts; the one that measures amaxes before, or None; the spec of the amaxes."""


@functools.lru_cache(maxsize=4096)
def cast_plan(
    x_dtype: torch.dtype,
    shape: tuple[int, int],  # of `x`, which is not empty
    strides: tuple[int, int],
    device: torch.device,
    source: str,  # of one scale: "given", "measured", "kept" or "recorded"; else "given"
    arguments: CastArguments,  # `via`: None or, if `source` is "given", bfloat16
) -> Callable[..., tuple[Any, ...]]:
    """Return a function (x, scale, amax) that allocates the results of a cast and launches kernels.

    ``source`` tells how it gets the one scale of ``x``: "given" as ``scale``; "measured" from the
    amax of ``x``; "kept": ``scale``, or measured if that is 0; "recorded": as "kept", and ``amax``
    is raised in place to the amax of ``x``. Pass None for a tensor that is not used. The function
    returns (the one scale, row data, row scales, column data (the transposed copy), column scales).
    The one scale is None if "given"; what is not requested and scales that do not exist are, too.
    """
    if source != "given" and not is_dense(shape, strides):
        dense = cast_plan(x_dtype, shape, (shape[1], 1), device, source, arguments)
        return lambda x, *scalars: dense(x.contiguous(), *scalars)  # `amax_plan` needs a dense x
    height, width, dtype, row, col, pad_rows, power_of_2, via = arguments
    pad_rows = pad_rows or width is not None
    sizes, layouts = (*shape, *strides), (row, col, pad_rows, True)  # column data's rows are padded
    reads_x_t = strides[0] == 1 and strides[1] != 1
    if reads_x_t:  # the kernels read x.t(), whose column data are the row data of x
        sizes, layouts = (*shape[::-1], *strides[::-1]), (col, row, True, pad_rows)
    mantissa_bits = 3 if dtype == E4M3 else 2
    scale_rounding = 2 if width == 32 else int(power_of_2)  # 2: 8-bit exponents, as in MXFP8
    arithmetic = mantissa_bits, scale_rounding, has_float8_conversion(device)
    matrix = _Matrix(x_dtype, device, sizes, *layouts, via is not None, arithmetic)
    whole_rows = False  # whether a program of the one kernel holds whole rows in registers
    if height is None:
        kernels = _tensor_kernels(matrix, source)
    elif width is not None:
        kernels = _block_launch(matrix, height, width, col), None, None
    # Triton 3.6 specializes on C == 1, and then pads wrongly.
    elif whole_rows := not matrix.col and 1 < matrix.sizes[1] <= WIDEST_ROW:
        kernels = _whole_row_launch(matrix), None, None
    else:
        kernels = _row_kernels(matrix)
    cast_x, measure_x, amaxes_spec = kernels
    specs, allocate = specs_of(shape, arguments), allocator(device)

    def launch(x: Tensor, scale: Tensor | None, amax: Tensor | None) -> tuple[Any, ...]:
        results = [allocate(*spec) if spec else None for spec in specs]
        written = results[2:] + results[:2] if reads_x_t else results  # results are those of x.t()
        if whole_rows:
            cast_x(x, *written[:2])
            return None, *results
        amaxes = used_scale = None
        if amaxes_spec is not None and measure_x is not None:  # both or neither are None
            amaxes = allocate(*amaxes_spec)
            if height is None:
                used_scale = allocate(*SCALAR)  # `cast_x` stores in it the scale that it uses
                measure_x(x, amaxes, scale)  # "kept", "recorded": stops early if the scale is set
            else:
                measure_x(x, amaxes.zero_())  # an atomic max raises the amaxes, from 0
        cast_x(x, *written, scale, amaxes, used_scale, amax)
        return used_scale, *results

    return launch


def _tensor_kernels(matrix: _Matrix, source: str) -> _Kernels:
    """Return (launch that casts by one scale, launch that measures amaxes, spec of the amaxes).

    ``source`` of the scale: see `cast_plan`; if that is "given", the last two results are None.
    """
    tile_shapes = tiles.COL_TILES if matrix.col else tiles.ROW_TILES
    if source == "given":
        return _tiled(matrix, tile_shapes, "tensor"), None, None
    R, C, *_ = matrix.sizes
    measure = amax_plan(R * C, matrix.dtype, matrix.device, unless_set=source != "measured")
    cast = _tiled(matrix, tile_shapes, "tensor", source=source, count=measure.programs)
    return cast, measure, ((measure.programs,), (1,), torch.float32)


def _whole_row_launch(matrix: _Matrix) -> Launch:
    """Return the launch that computes a scale for each row and casts the row, reading it once."""
    R, C, *_ = matrix.sizes
    block_c = max(1 << (C - 1).bit_length(), 16)
    rows = max(4096 // block_c, 1)  # of a program
    unmasked = R % max(rows, 16) == 0 and block_c == C
    num_warps = min(max(rows * block_c // 1024, 1), 16)  # 32 or 64 elements a thread
    kernel, programs = cast_kernels.cast_rows_kernel, -(-ceil16(R) // rows)
    constants = (matrix.pad_rows, *matrix.arithmetic, unmasked, rows, block_c)
    return Launch(kernel, matrix.device, programs, matrix.sizes, constants, num_warps)


def _row_kernels(matrix: _Matrix) -> _Kernels:
    """Return (launch that casts by scales of rows, launch that measures amaxes, their spec)."""
    R, C, *_ = matrix.sizes
    rows, block_c, strips = tiles.strips_of(R, C, matrix.dtype, matrix.device)
    kernel, programs = cast_kernels.measure_kernel, -(-R // rows) * strips
    constants = matrix.row, matrix.col, C % block_c == 0, tiles.STRIP_R, block_c
    sizes = (*matrix.sizes, rows)
    measure = Launch(kernel, matrix.device, programs, sizes, constants, tiles.STRIP_WARPS)
    # 64 x 128 in place of 128 x 128: two scales for each element take more registers.
    col_tiles = ((64, 128, 8), *tiles.COL_TILES[1:])
    cast = _tiled(matrix, col_tiles if matrix.col else tiles.ROW_TILES, "row")
    return cast, measure, ((R + C,), (1,), torch.int32)  # amaxes of rows, then of columns


def _block_launch(matrix: _Matrix, height: int, width: int, col: bool) -> Launch:
    """Return the launch that casts with scales of blocks; ``col``: `x` is cast to column data."""
    R, C, *_ = matrix.sizes
    if height == width:
        return _tiled(matrix, ((128, 128, 8),), "square", width)
    # Under (1, 128), scales of columns are best computed by few threads with many registers, which
    # spill if there are masks, too. Under (1, 32), each thread has many scales, so tiles are small.
    tile_shape = 128, 128, 4 if col and R % 128 == C % 128 == 0 else 8
    tile_shape = (64, 64, 2) if width == 32 else tile_shape
    return _tiled(matrix, (tile_shape,), "run", width)


def _tiled(
    matrix: _Matrix,
    tile_shapes: tuple[tiles.Tile, ...],  # (rows, columns, warps); else the last is used
    granularity: str,  # what a scale covers: "tensor", "row", "run" (part of a row), "square"
    width: int = 1,  # of a run or square
    source: str = "given",  # of the scale of a "tensor", see `cast_plan`
    count: int = 0,  # of amaxes of parts of x, from which the kernel computes that scale
) -> Launch:
    """Return the launch of `cast_kernel`, on the first shape with >= 2 tiles per multiprocessor."""
    count_power_of_2 = 1 << max(count - 1, 0).bit_length()
    layouts = matrix.row, matrix.col, matrix.pad_rows, matrix.pad_cols, matrix.rounded
    constants = granularity, width, source, count_power_of_2, *layouts, *matrix.arithmetic
    sizes = (*matrix.sizes, count)
    return tiles.tiled(cast_kernels.cast_kernel, tile_shapes, matrix.device, sizes, constants)


def _cast_op(x: Tensor, scale: Tensor | None, *flat: Any, **named: Any) -> list[Tensor]:
    return _cast_triton(x, scale, _arguments(*flat, **named))


def _signature_of_cast() -> inspect.Signature:
    """Return the signature of the op `cast`: x, scale, fields of `CastArguments`, then `after`."""
    x, scale, _, after, _ = inspect.signature(cast_reference).parameters.values()
    fields = inspect.signature(CastArguments).parameters.values()
    parameters = [x, scale, *fields, after.replace(kind=x.kind)]
    return inspect.Signature(parameters, return_annotation=list[Tensor])


cast_reference.__signature__ = _signature_of_cast()  # type: ignore[attr-defined]
register("cast", cast_reference, triton=_cast_op, fake=_cast_fake)
