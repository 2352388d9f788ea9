"""High precision -> float8 under one scale, in both layouts that float8 GEMMs read.

`cast` is given the scale, `cast_dynamic` takes it from the amax of the tensor; `cast_delayed.py`
has the one that takes it from a history.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX
from float8.kernels._cast_launch import MEASURED, Options, launch_cast
from float8.kernels._checks import check_cast, check_scalar
from float8.kernels._direct import takes_triton_directly
from float8.kernels._memory import empty
from float8.kernels.amax import amax_reference, measure
from float8.kernels.layout import ceil16
from float8.scaling import amax_to_scale


def cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    after: Tensor | None = None,
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
        after: what a compiler must have computed first; not read. What backward makes of a weight
            alone a compiler may move into forward, and keep all the while: a gradient stops it.

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
    if takes_triton_directly(x, scale):
        return cast_triton(x, scale, dtype, row=row, col=col, pad_rows=pad_rows)
    out = torch.ops.float8.cast.default(x, scale, dtype, row, col, pad_rows, after)
    return unpack(out, row, col)


class Cast(NamedTuple):
    """A tensor in float8, with the scale that the cast chose."""

    scale: Tensor
    """0-dim float32 decode scale; a new tensor."""

    row: Tensor | None
    col: Tensor | None


def cast_dynamic(
    x: Tensor,
    dtype: torch.dtype,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    round_to_power_of_2: bool = False,
) -> Cast:
    """Cast ``x`` with the scale from its own amax, in two launches.

    The same as ``cast(x, amax_to_scale(amax(x), ...), ...)``, bit for bit, and for eager mode: to
    a compiler the amax is better left apart.

    Args:
        x: [R, C] float32, bfloat16 or float16; any strides.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        row: as in :func:`cast`.
        col: as in :func:`cast`.
        pad_rows: as in :func:`cast`.
        round_to_power_of_2: round the scale up to a power of two.

    Raises:
        TypeError: as :func:`cast`.
        ValueError: as :func:`cast`.
    """
    if takes_triton_directly(x):
        out = cast_dynamic_triton(x, dtype, row, col, pad_rows, round_to_power_of_2)
    else:
        out = torch.ops.float8.cast_dynamic.default(
            x, dtype, row, col, pad_rows, round_to_power_of_2
        )
    return Cast(out[0], *unpack(out[1:], row, col))


def unpack(out: list[Tensor], row: bool, col: bool) -> tuple[Tensor | None, Tensor | None]:
    """An op's list of one or two tensors as ``(row_data, col_data)``."""
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
    check_cast(x, dtype, row, col)
    check_scalar("scale", scale, x)
    data = quantize(x, scale, dtype).view(torch.uint8)
    row_data, col_data = allocate(x, dtype, row, col, pad_rows)
    for out, part in ((row_data, data), (col_data, data.t())):
        if out is not None:
            out = out.view(torch.uint8)
            if out.shape != part.shape:
                out.zero_()
            out[: part.shape[0], : part.shape[1]] = part
    return row_data, col_data


def cast_dynamic_reference(
    x: Tensor, dtype: torch.dtype, row: bool, col: bool, pad_rows: bool, round_to_power_of_2: bool
) -> list[Tensor]:
    """Plain-torch twin of the kernel; see :func:`cast_dynamic`."""
    check_cast(x, dtype, row, col)
    scale = amax_to_scale(amax_reference(x), dtype, round_to_power_of_2)
    return pack(scale, cast_reference(x, scale, dtype, row=row, col=col, pad_rows=pad_rows))


def pack(scale: Tensor, data: tuple[Tensor | None, Tensor | None]) -> list[Tensor]:
    """What an op that chooses the scale returns."""
    return [scale, *(layout for layout in data if layout is not None)]


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
    check_cast(x, dtype, row, col)
    check_scalar("scale", scale, x)
    return launch_cast(x, Options(dtype, row, col, pad_rows), scale=scale)


def cast_dynamic_triton(
    x: Tensor, dtype: torch.dtype, row: bool, col: bool, pad_rows: bool, round_to_power_of_2: bool
) -> list[Tensor]:
    """Triton kernels; see :func:`cast_dynamic`."""
    check_cast(x, dtype, row, col)
    if x.numel() == 0:
        return cast_dynamic_reference(x, dtype, row, col, pad_rows, round_to_power_of_2)
    parts = measure(x)
    scale = empty((), torch.float32, x.device)
    options = Options(dtype, row, col, pad_rows, MEASURED, parts.numel(), round_to_power_of_2)
    return pack(scale, launch_cast(x, options, parts=parts, scale_out=scale))
