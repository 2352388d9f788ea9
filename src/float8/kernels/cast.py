"""High precision -> float8 under one scale per tensor, in both layouts that float8 GEMMs read.

`cast` is given the scale, `cast_dynamic` takes it from the amax of the tensor, and `cast_delayed`
from a history, recording the amax in the same read. All launch the kernel of `cast_kernel`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.kernels.amax import amax_reference, is_dense, measuring
from float8.kernels.cast_kernel import casting
from float8.kernels.checks import check_high_precision, check_scalar, check_state, describe
from float8.kernels.runtime.launch import Program, Slot, planned, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.quantize.history import DelayedScale
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import CastSpec

Layouts = tuple[Tensor | None, Tensor | None]
"""Row data and column data, None where not asked for."""


class Cast(NamedTuple):
    """A tensor in float8, with the scale that the cast chose."""

    scale: Tensor
    """0-dim float32 decode scale; a new tensor."""

    row: Tensor | None
    col: Tensor | None


def cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    after: Tensor | None = None,
) -> Layouts:
    """Cast ``x`` to float8 under one scale, to row data, to its transpose, or to both.

    Each element is ``x.float() * (1 / scale)`` in float32, saturated to the largest finite value
    of ``dtype`` and rounded to the nearest, ties to even. An element of ``x`` that is Inf or NaN
    becomes NaN in both formats, and so does a product that is NaN (0 * Inf): the NaN byte is
    always 0x7f. Both layouts come from one read of ``x``.

    Args:
        x: [R, C] float32, bfloat16 or float16; any strides. Slow, but right, where no dim is
            contiguous.
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
    check_cast(x, dtype, row, col)
    check_scalar("scale", scale, x)
    args = (x, scale, dtype, row, col, pad_rows)
    if x.is_cuda and takes_triton_directly(x, scale):
        out = _cast_triton(*args)
    else:
        out = torch.ops.float8.cast.default(*args, after)
    return out[0] if row else None, out[-1] if col else None


def cast_dynamic(
    x: Tensor, spec: CastSpec, *, row: bool, col: bool, pad_rows: bool = False
) -> Cast:
    """Cast ``x`` with the scale from its own amax, in two launches; all else as :func:`cast`.

    The same as ``cast(x, amax_to_scale(amax(x), ...), ...)``, bit for bit. To a compiler it is one
    opaque op: where the amax should fuse into what produces ``x``, take it apart with `amax`.
    """
    check_cast(x, spec.dtype, row, col)
    args = (x, spec.dtype, row, col, pad_rows, spec.power_of_2)
    if x.is_cuda and takes_triton_directly(x):
        out = _cast_dynamic_triton(*args)
    else:
        out = torch.ops.float8.cast_dynamic.default(*args)
    return Cast(out[0], out[1] if row else None, out[-1] if col else None)


def cast_delayed(
    x: Tensor,
    spec: CastSpec,
    state: DelayedScale,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    record: bool = True,
) -> Cast:
    """Cast ``x`` with a scale known beforehand, and record its amax in the same read.

    The scale of ``state`` is used, or where it is 0 (unknown) that from the amax of ``x``, as in
    :func:`cast_dynamic`. Its amax is raised in place to that of ``x`` if ``record``; a NaN stays.
    All else as :func:`cast`.
    """
    scale, amax = state
    check_cast(x, spec.dtype, row, col)
    check_state(state, x)
    args = (x, scale, amax, spec.dtype, row, col, pad_rows, spec.power_of_2, record)
    if x.is_cuda and takes_triton_directly(x, scale, amax):
        out = _cast_delayed_triton(*args)
    else:
        out = torch.ops.float8.cast_delayed.default(*args)
    return Cast(out[0], out[1] if row else None, out[2] if col else None)


def check_cast(x: Tensor, dtype: torch.dtype, row: bool, col: bool) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what no cast can take."""
    if not isinstance(x, Tensor) or x.dtype not in HIGH_PRECISION_DTYPES:
        check_high_precision("cast", x)
    if x.dim() != 2:
        raise ValueError(
            f"cast: x is {describe(x)}; expected 2 dimensions [R, C]. "
            f"Flatten the leading dimensions first: x.reshape(-1, x.shape[-1])."
        )
    if dtype not in FLOAT8_MAX:
        raise TypeError(
            f"cast: dtype is {dtype}; expected torch.float8_e4m3fn or torch.float8_e5m2."
        )
    if not (row or col):
        raise ValueError("cast: got row=False, col=False; expected at least one of them True.")


# ---------------------------------------------------------------- plain-torch twins


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The arithmetic of :func:`cast`, elementwise: x -> float8; ``scale`` broadcasts against it."""
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
    scale: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Plain-torch twin of :func:`cast`: the layouts asked for."""
    data = to_float8(x, scale.reshape(()), dtype).view(torch.uint8)
    layouts = [data] * row + [data.t()] * col
    out = allocate(x, dtype, row, col, pad_rows)
    for target, source in zip(out, layouts, strict=True):
        target = target.view(torch.uint8)
        if target.shape != source.shape:
            target.zero_()
        target[: source.shape[0], : source.shape[1]] = source
    return out


def cast_dynamic_reference(
    x: Tensor, dtype: torch.dtype, row: bool, col: bool, pad_rows: bool, power_of_2: bool
) -> list[Tensor]:
    """Plain-torch twin of :func:`cast_dynamic`: the scale, then the layouts asked for."""
    scale = amax_to_scale(amax_reference(x), dtype, power_of_2)
    return [scale, *cast_reference(x, scale, dtype, row, col, pad_rows)]


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
    """Plain-torch twin of :func:`cast_delayed`: scale, row data, column data."""
    wanted = (dtype, row, col, pad_rows, power_of_2, record)
    return _fixed(x, row, col, *cast_choosing_reference(x, scale, amax, *wanted))


def cast_choosing_reference(
    x: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    power_of_2: bool,
    record: bool,
) -> list[Tensor]:
    """The scale, from the history if there is one, and layouts; records the amax of ``x`` there."""
    own = amax_reference(x)
    used = amax_to_scale(own, dtype, power_of_2)
    if scale is not None:
        if record:
            assert amax is not None
            amax.copy_(torch.maximum(amax, own))
        scale = scale.reshape(())
        used = torch.where(scale == 0.0, used, scale)
    return [used, *cast_reference(x, used, dtype, row, col, pad_rows)]


def rows_reference(x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """What twins of fused casts do with their float32 product: the scale used, row data."""
    dtype, scale, amax, *flags = how
    used, row = cast_choosing_reference(x, scale, amax, dtype, True, False, False, *flags)
    return used, row


def allocate(
    x: Tensor, dtype: torch.dtype, row: bool, col: bool, pad_rows: bool = False, *_: object
) -> list[Tensor]:
    """Uninitialised layouts, those asked for; sizes may be symbolic."""
    R, C = x.shape
    Rp, Cp = (R + 15) // 16 * 16, (C + 15) // 16 * 16  # `ceil16`, without calls in eager mode
    out = []
    if row:
        out.append(x.new_empty((Rp if pad_rows else R, Cp), dtype=dtype))
    if col:
        out.append(x.new_empty((Cp, Rp), dtype=dtype))
    return out


def _fixed(
    x: Tensor, row: bool, col: bool, scale: Tensor, *data: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors, an empty one for a layout that was not asked for.

    Ops that write an argument must return a fixed number: the compiler's functionalisation takes no
    list.
    """
    if row and col:
        return scale, data[0], data[1]
    absent = x.new_empty((0,), dtype=x.dtype)
    return (scale, data[0], absent) if row else (scale, absent, data[0])


# ---------------------------------------------------------------- Triton

# Each takes what its twin takes.


def _cast_triton(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    after: Tensor | None = None,
) -> list[Tensor]:
    return _cast_program(x, dtype, row, col, pad_rows)(x, scale)


@planned
def _cast_program(x: Slot, *wanted: Any) -> Program:
    scale = Slot(torch.float32)
    return Program([x, scale], *casting(x, *wanted, scale=scale), anywhere=1)


def _cast_dynamic_triton(x: Tensor, *wanted: Any) -> list[Tensor]:
    return _dynamic_program(x, *wanted)(x)


@planned
def _dynamic_program(x: Slot, *wanted: Any) -> Callable[[Tensor], list[Tensor]]:
    if 0 in x.shape:
        return lambda x: cast_dynamic_reference(x, *wanted)
    if not is_dense(x.shape, x.strides):
        return lambda x: _cast_dynamic_triton(x.contiguous(), *wanted)
    parts, measure = measuring(x)
    results, launches = casting(x, *wanted, parts=parts)
    return Program([x], results, [measure, *launches])


def _cast_delayed_triton(
    x: Tensor, scale: Tensor, amax: Tensor, *wanted: Any
) -> tuple[Tensor, Tensor, Tensor]:
    made = _delayed_program(x, *wanted)(x, scale, amax)
    if wanted[-1]:  # record
        torch.autograd.graph.increment_version(amax)  # as PyTorch does
    return _fixed(x, *wanted[1:3], *made)


@planned
def _delayed_program(x: Slot, *wanted: Any) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    *layouts, record = wanted
    if 0 in x.shape:
        return lambda x, scale, amax: cast_choosing_reference(x, scale, amax, *wanted)
    if not is_dense(x.shape, x.strides):

        def of_copy(x: Tensor, *state: Tensor) -> list[Tensor]:
            x = x.contiguous()
            return _delayed_program(x, *wanted)(x, *state)

        return of_copy
    scale, amax = Slot(torch.float32), Slot(torch.float32)
    parts, measure = measuring(x, scale)
    results, launches = casting(
        x, *layouts, scale=scale, parts=parts, amax=amax if record else None
    )
    return Program([x, scale, amax], results, [measure, *launches], anywhere=2)


def cast_dynamic_fake(x: Tensor, *wanted: Any) -> list[Tensor]:
    """Uninitialised results of `cast_dynamic_reference`."""
    return [x.new_empty((), dtype=torch.float32), *allocate(x, *wanted)]


register(
    "cast",
    cast_reference,
    triton=_cast_triton,
    fake=lambda x, scale, *wanted: allocate(x, *wanted),
)
register(
    "cast_dynamic", cast_dynamic_reference, triton=_cast_dynamic_triton, fake=cast_dynamic_fake
)
register(
    "cast_delayed",
    cast_delayed_reference,
    triton=_cast_delayed_triton,
    fake=lambda x, scale, amax, dtype, row, col, *wanted: _fixed(
        x, row, col, *cast_dynamic_fake(x, dtype, row, col, *wanted)
    ),
    writes=("amax",),
)
