"""High precision -> float8 under one scale, in both layouts that float8 GEMMs read."""

import functools

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX
from float8.kernels._checks import check_cast
from float8.kernels._device import has_float8_conversion, launch, sm_count
from float8.kernels._float8 import to_float8_bits, to_float8_words, to_float32
from float8.kernels._tiles import TileLaunch, fitting, load, store, tile_of_program
from float8.kernels._triton import jit, tl
from float8.kernels.layout import ceil16


def cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Cast ``x`` to float8 under one scale, to row data, to its transpose, or to both.

    Each element is ``x.float() * (1 / scale)`` in float32, saturated to the largest finite value
    of ``dtype`` and rounded to the nearest, ties to even. An element of ``x`` that is Inf or NaN
    becomes NaN in both formats, and so does a product that is NaN (0 * Inf): the NaN byte is
    always 0x7f. Both layouts come from one read of ``x``. This is one opaque op,
    ``torch.ops.float8.cast``, in eager mode and under ``torch.compile``.

    Args:
        x: [R, C] float32, bfloat16 or float16; any strides.
        scale: one element, float32, on the device of ``x``: the decode scale (x ~ data * scale).
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        row: whether to return the row data.
        col: whether to return the column data.
        pad_rows: whether the row data has its number of rows padded to a multiple of 16 too.

    Returns:
        ``(row_data, col_data)``, contiguous, None where not asked for. With ceil16 rounding up to
        a multiple of 16, row_data is [R, ceil16(C)], or [ceil16(R), ceil16(C)] if ``pad_rows``;
        col_data is [ceil16(C), ceil16(R)], the transposed copy. Padding is zero.
        No gradient flows through it.

    Raises:
        TypeError: the dtype of ``x``, of ``scale``, or ``dtype`` is not one of those above.
        ValueError: ``x`` is not 2-D, ``scale`` has not one element or is on another device, or
            neither layout is asked for.
    """
    out: list[Tensor] = torch.ops.float8.cast.default(x, scale, dtype, row, col, pad_rows)
    return unpack(out, row, col)


def unpack(out: list[Tensor], row: bool, col: bool) -> tuple[Tensor | None, Tensor | None]:
    """The op's list of one or two tensors as ``(row_data, col_data)``."""
    return (out[0] if row else None), (out[-1] if col else None)


def allocate(
    x: Tensor, dtype: torch.dtype, row: bool, col: bool, pad_rows: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Uninitialised outputs of :func:`cast`; also its fake, so sizes may be symbolic."""
    R, C = x.shape
    Rp, Cp = ceil16(R), ceil16(C)
    row_data = x.new_empty((Rp if pad_rows else R, Cp), dtype=dtype) if row else None
    col_data = x.new_empty((Cp, Rp), dtype=dtype) if col else None
    return row_data, col_data


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The arithmetic of :func:`cast`, elementwise on any shape: x -> float8 of the same shape."""
    limit = FLOAT8_MAX[dtype]
    inverse = 1.0 / scale.reshape(())
    v = x.to(torch.float32) * inverse
    # Saturate here and not in the conversion: torch releases differ in what they make of Inf.
    v = v.clamp(-limit, limit)  # keeps NaN
    # One NaN for all, also in its sign bit, which differs between CPUs and GPUs.
    return torch.where(x.isfinite() & ~v.isnan(), v, torch.nan).to(dtype)


def cast_reference(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Plain-torch twin of the kernel; see :func:`cast`."""
    check_cast(x, scale, dtype, row, col)
    data = quantize(x, scale, dtype).view(torch.uint8)
    row_data, col_data = allocate(x, dtype, row, col, pad_rows)
    for out, part in ((row_data, data), (col_data, data.t())):
        if out is not None:
            out = out.view(torch.uint8)
            if out.shape != part.shape:
                out.zero_()
            out[: part.shape[0], : part.shape[1]] = part
    return row_data, col_data


def cast_triton(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Triton kernel; see :func:`cast`.

    Reads along whichever dim of ``x`` is contiguous; slow, but right, where none is.
    """
    check_cast(x, scale, dtype, row, col)
    config = _plan(x.shape, x.stride(), row, col, x.device)
    return launch_cast(x, scale, dtype, row, col, pad_rows, config)


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
    return fitting(R, C, sms, both if across else ((32, 256, 4), (16, 128, 2)))


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int], strides: tuple[int, int], row: bool, col: bool, device: torch.device
) -> TileLaunch:
    R, C = shape
    if reads_along_rows(strides):
        return launch_config(R, C, across=col, sms=sm_count(device))
    return launch_config(C, R, across=row, sms=sm_count(device))


def reads_along_rows(strides: tuple[int, ...]) -> bool:
    """Whether the kernel takes x as it lies; else it takes x.t(), with row and col swapped."""
    return strides[1] == 1 or strides[0] != 1


# What the kernel makes of one of its two outputs.
_ABSENT, _EXACT_ROWS, _PADDED_ROWS = 0, 1, 2


def launch_cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    config: TileLaunch,
) -> tuple[Tensor | None, Tensor | None]:
    """Run the kernel under one launch configuration."""
    row_data, col_data = allocate(x, dtype, row, col, pad_rows)
    if x.numel() == 0:
        return row_data, col_data
    (R, C), (stride_r, stride_c) = x.shape, x.stride()
    along, across = row_data, col_data
    along_rows, across_rows = (_PADDED_ROWS if pad_rows else _EXACT_ROWS), _PADDED_ROWS
    if not reads_along_rows((stride_r, stride_c)):
        R, C, stride_r, stride_c = C, R, stride_c, stride_r
        along, across, along_rows, across_rows = across, along, across_rows, along_rows
    launch(
        _cast_kernel,
        (config.programs, x.device),
        # The pointer of the other output stands in for one that is absent.
        (
            x,
            scale,
            across if along is None else along,
            along if across is None else across,
            R,
            C,
            stride_r,
            stride_c,
        ),
        ALONG=_ABSENT if along is None else along_rows,
        ACROSS=_ABSENT if across is None else across_rows,
        MANTISSA=3 if dtype == torch.float8_e4m3fn else 2,
        HARDWARE=has_float8_conversion(x.device),
        EVEN=config.even,
        BLOCK_R=config.block_r,
        BLOCK_C=config.block_c,
        GROUP=config.group,
        num_warps=config.num_warps,
    )
    return row_data, col_data


@jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    scale_ptr,
    along_ptr,  # contiguous along C, at least [R, C]
    across_ptr,  # contiguous along R, at least [C, R]
    R,
    C,
    stride_r,
    stride_c,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    MANTISSA: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    Rp = tl.cdiv(R, 16) * 16
    Cp = tl.cdiv(C, 16) * 16
    tile_r, tile_c = tile_of_program(Rp, Cp, BLOCK_R, BLOCK_C, GROUP)
    # The tile as four tiles of every fourth row: see _tiles. 64-bit, so that offsets are.
    quad = (tile_r * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)).to(tl.int64)[:, None]
    c = (tile_c * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
    r0, r1, r2, r3 = quad * 4, quad * 4 + 1, quad * 4 + 2, quad * 4 + 3
    in_c = c < C
    x_ptr += c * stride_c
    inverse = tl.div_rn(1.0, tl.load(scale_ptr))
    v0 = _scaled(x_ptr + r0 * stride_r, (r0 < R) & in_c, inverse, HARDWARE, EVEN)
    v1 = _scaled(x_ptr + r1 * stride_r, (r1 < R) & in_c, inverse, HARDWARE, EVEN)
    v2 = _scaled(x_ptr + r2 * stride_r, (r2 < R) & in_c, inverse, HARDWARE, EVEN)
    v3 = _scaled(x_ptr + r3 * stride_r, (r3 < R) & in_c, inverse, HARDWARE, EVEN)

    if ALONG != 0:
        rows = R if ALONG == 1 else Rp
        in_cp = c < Cp
        along_ptr = along_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + c
        b0 = to_float8_bits(v0, MANTISSA, HARDWARE)
        b1 = to_float8_bits(v1, MANTISSA, HARDWARE)
        b2 = to_float8_bits(v2, MANTISSA, HARDWARE)
        b3 = to_float8_bits(v3, MANTISSA, HARDWARE)
        store(along_ptr + r0 * Cp, b0, (r0 < rows) & in_cp, EVEN)
        store(along_ptr + r1 * Cp, b1, (r1 < rows) & in_cp, EVEN)
        store(along_ptr + r2 * Cp, b2, (r2 < rows) & in_cp, EVEN)
        store(along_ptr + r3 * Cp, b3, (r3 < rows) & in_cp, EVEN)
    if ACROSS != 0:
        rows = C if ACROSS == 1 else Cp
        c, quad = tl.trans(c), tl.trans(quad)
        across_ptr = across_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + quad
        words = tl.trans(to_float8_words(v0, v1, v2, v3, MANTISSA, HARDWARE))
        store(across_ptr + c * (Rp // 4), words, (c < rows) & (quad < Rp // 4), EVEN)


@jit
def _scaled(  # type: ignore[no-untyped-def]
    x_ptrs, inside, inverse, HARDWARE: tl.constexpr, EVEN: tl.constexpr
):
    """The elements at ``x_ptrs`` times ``inverse``, float32; zero where not ``inside``."""
    v = to_float32(load(x_ptrs, inside, EVEN), HARDWARE)
    # An Inf in x must become NaN, though a product that overflows saturates. Inf * 0 is NaN, and
    # to add a zero of the product's own sign changes nothing else, contracted to an FMA or not.
    zero = (inverse.to(tl.int32, bitcast=True) & -0x80000000).to(tl.float32, bitcast=True)
    v = v * inverse + v * zero
    if not EVEN:
        v = tl.where(inside, v, 0.0)  # also where the scale is zero: 0 * Inf
    return v
