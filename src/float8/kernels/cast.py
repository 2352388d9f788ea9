"""High precision -> float8 under one scale per tensor, in both layouts that float8 GEMMs read.

`cast` is given the scale or takes it from the amax of the tensor, `cast_delayed` takes it from a
history and records the amax in the same read. Both launch the kernel of `cast_kernel`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.config import CastConfig
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.amax import amax_reference, is_dense, measuring
from float8.kernels.cast_kernel import casting, layouts
from float8.kernels.checks import check_high_precision, describe
from float8.kernels.runtime.launch import Program, Slot, empty, new, planned, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.scales import DelayedScale, Operand, amax_to_scale


def cast(
    x: Tensor,
    spec: CastConfig,
    *,
    scale: Tensor | None = None,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    after: Tensor | None = None,
    via: torch.dtype | None = None,
) -> tuple[Operand | None, Operand | None]:
    """Cast ``x`` to float8 under one scale, to row data, to its transpose, or to both.

    Each element is ``x.float() * (1 / scale)`` in float32, saturated to the largest finite value
    of the format and rounded to the nearest, ties to even. An element of ``x`` that is Inf or NaN
    becomes NaN in both formats, and so does a product that is NaN (0 * Inf): the NaN byte is
    always 0x7f. Both layouts come from one read of ``x``.

    Args:
        x: [R, C] float32, bfloat16 or float16; any strides. Slow, but right, where no dim is
            contiguous.
        spec: format, and whether a scale from the amax is rounded up to a power of two.
        scale: one element, float32, on the device of ``x``: the decode scale (x ~ data * scale).
            None: that of the amax of ``x``, in two launches, the same as to give
            ``amax_to_scale(amax(x), ...)``. To a compiler it is one opaque op: where the amax
            should fuse into what produces ``x``, take it apart with `amax`.
        row: whether to return the row data.
        col: whether to return the column data.
        pad_rows: whether the row data has its number of rows padded to a multiple of 16 too.
        after: what a compiler must have computed first; not read. What backward makes of a weight
            alone a compiler may move into forward, and keep all the while: a gradient stops it.
        via: ``x`` is rounded to this dtype first. From float32 to bfloat16, under a given scale,
            that takes no pass of its own.

    Returns:
        ``(row, col)``, None where not asked for, each with the scale that was given, or a new one,
        0-dim. Data are contiguous. With ceil16 rounding up to a multiple of 16, row data is
        [R, ceil16(C)], or [ceil16(R), ceil16(C)] if ``pad_rows``; column data is
        [ceil16(C), ceil16(R)], the transposed copy. Padding is zero. No gradient flows through it.

    Raises:
        TypeError: the dtype of ``x``, of ``scale``, or the format is not one of those above.
        ValueError: ``x`` is not 2-D, ``scale`` has not one element or is on another device, or
            neither layout is asked for.
    """
    check_cast("cast", x, row, col, None if scale is None else {"scale": scale})
    how = (spec.dtype, row, col, pad_rows, after, spec.power_of_2, via)
    direct = x.is_cuda and takes_triton_directly(x, scale)
    out = (_cast_triton if direct else torch.ops.float8.cast.default)(x, scale, *how)
    used = out[0] if scale is None else scale
    return Operand(out[-1 - col], used) if row else None, Operand(out[-1], used) if col else None


def cast_delayed(
    x: Tensor,
    spec: CastConfig,
    state: DelayedScale,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    record: bool = True,
) -> tuple[Operand | None, Operand | None]:
    """Cast ``x`` with a scale known beforehand, and record its amax in the same read.

    The scale of ``state`` is used, or where it is 0 (unknown) that from the amax of ``x``. Its amax
    is raised in place to that of ``x`` if ``record``; a NaN stays. The scale returned is a new
    tensor. All else as :func:`cast`.
    """
    scale, amax = state
    check_cast("cast_delayed", x, row, col, {"scale": scale, "amax": amax})
    args = (x, scale, amax, spec.dtype, row, col, pad_rows, spec.power_of_2, record)
    direct = x.is_cuda and takes_triton_directly(x, scale, amax)
    out = (_cast_delayed_triton if direct else torch.ops.float8.cast_delayed.default)(*args)
    return Operand(out[1], out[0]) if row else None, Operand(out[2], out[0]) if col else None


def check_cast(
    op: str,
    x: Tensor,
    row: bool,
    col: bool,
    scalars: Mapping[str, Tensor] | None = None,
) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what a cast cannot take.

    Args:
        op: is named in errors.
        x: must be [R, C] in high precision.
        row: whether row data is asked for; one of both must be.
        col: whether column data is.
        scalars: each a scale or an amax of all of ``x``; by their names.
    """
    if not isinstance(x, Tensor) or x.dtype not in HIGH_PRECISION_DTYPES:
        check_high_precision(op, x)
    if x.dim() != 2:
        raise ValueError(
            f"{op}: x is {describe(x)}; expected 2 dimensions [R, C]. "
            f"Flatten the leading dimensions first: x.reshape(-1, x.shape[-1])."
        )
    if not (row or col):
        raise ValueError(f"{op}: got row=False, col=False; expected at least one of them True.")
    for name, scalar in scalars.items() if scalars else ():
        if not isinstance(scalar, Tensor) or scalar.dtype != torch.float32:
            raise TypeError(
                f"{op}: {name} is {describe(scalar)}; expected a float32 tensor with one element. "
                f"Convert it first, e.g. {name}.to(torch.float32)."
            )
        if scalar.numel() != 1:
            raise ValueError(
                f"{op}: {name} is {describe(scalar)}; expected one element, that of the whole "
                f"tensor. Row and block scales are not taken by this kernel."
            )
        if scalar.device != x.device:
            raise ValueError(
                f"{op}: {name} is on {scalar.device} and x on {x.device}; expected one device. "
                f"Move it: {name}.to(x.device)."
            )


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


def cast_blocks(
    x: Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    padded: tuple[int, int],
    blocks: tuple[int, ...],
    *dims: int,
) -> tuple[Tensor, Tensor]:
    """Cast ``x`` [R, C] under a scale per block: what the twins of casts under finer scales share.

    Args:
        x: high precision.
        dtype: the float8 format.
        power_of_2: whether scales are rounded up to powers of two.
        padded: the shape of the data. What it has more than ``x`` is zero, also in amaxes.
        blocks: a shape with dims for the number and the extent of blocks, as ``view`` takes it.
        dims: those of the extents.

    Returns:
        Data of shape ``padded``, contiguous; scales, whose shape is ``blocks`` without ``dims``.
    """
    R, C = x.shape
    below, right = padded[0] - R, padded[1] - C
    # A compiler drops what pads by nothing. To ask it here would make it compile again for sizes
    # that need other padding.
    pads = torch.compiler.is_compiling() or below != 0 or right != 0
    if pads:
        x = F.pad(x, (0, right, 0, below))
    amax = x = x.view(blocks)
    for dim in dims:
        if amax.shape[dim] == 0:
            amax = amax.sum(dim, keepdim=True, dtype=torch.float32)
        else:
            # In float32 before: one in 16 bits would be two numbers in Inductor's code, rounded
            # where a kernel loads it and not yet rounded in the kernel that takes it. Data would be
            # cast under one scale and multiplied with the other.
            amax = amax.to(torch.float32).abs().amax(dim, keepdim=True)
    scale = amax_to_scale(amax, dtype, power_of_2)
    data = to_float8(x, scale, dtype).reshape(padded)
    if pads:  # once more: next to a NaN a zero has become NaN, too
        data = F.pad(data.view(torch.uint8)[:R, :C], (0, right, 0, below)).view(dtype)
    return data.contiguous(), scale.squeeze(dims)


def cast_reference(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    after: Tensor | None = None,
    power_of_2: bool = False,
    via: torch.dtype | None = None,
) -> list[Tensor]:
    """Plain-torch twin of :func:`cast`: the scale if none was given, then the layouts asked for."""
    out, x = [], x.to(via or x.dtype)
    if scale is None:
        scale = amax_to_scale(amax_reference(x), dtype, power_of_2)
        out = [scale]
    codes = to_float8(x, scale.reshape(()), dtype).view(torch.uint8)
    below, right = -x.shape[0] % 16, -x.shape[1] % 16
    if row:
        out.append(F.pad(codes, (0, right, 0, below if pad_rows else 0)).contiguous().view(dtype))
    if col:
        out.append(F.pad(codes.t().contiguous(), (0, below, 0, right)).view(dtype))
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
    """Plain-torch twin of :func:`cast_delayed`: scale, row data, column data."""
    own = amax_reference(x)
    used, scale = amax_to_scale(own, dtype, power_of_2), scale.reshape(())
    if record:
        amax.copy_(torch.maximum(amax, own))
    used = torch.where(scale == 0.0, used, scale)
    out, absent = cast_reference(x, used, dtype, row, col, pad_rows), x.new_empty((0,))
    return used, out[0] if row else absent, out[-1] if col else absent


def _cast_fake(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, row: bool, col: bool, *pads: Any
) -> list[Tensor]:
    """Uninitialised results of `cast_reference`."""
    used = new((), torch.float32) if scale is None else None
    return empty(x, used, *layouts(x.shape, dtype, row, col, *pads[:1]))


def _cast_delayed_fake(x: Tensor, scale: Tensor, amax: Tensor, *wanted: Any) -> tuple[Tensor, ...]:
    # Ops that write an argument must return a fixed number: the compiler's functionalisation takes
    # no list. So there is an empty tensor for a layout that was not asked for.
    along, _, across, _ = layouts(x.shape, *wanted[:4])
    absent = new((0,), x.dtype)
    return tuple(empty(x, new((), torch.float32), along or absent, across or absent))


# ---------------------------------------------------------------- Triton

# Each takes what its twin takes.


def _cast_triton(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    after: Tensor | None = None,
    power_of_2: bool = False,
    via: torch.dtype | None = None,
) -> list[Tensor]:
    rounded = (x.dtype, via) == (torch.float32, torch.bfloat16) and scale is not None
    if via is not None and not rounded:
        x = x.to(via)
    if scale is None:
        out: list[Tensor] = _measured_program(x, None, dtype, row, col, pad_rows, power_of_2)(x)
        return out
    return _program(x, rounded, dtype, row, col, pad_rows)(x, scale)


def _cast_delayed_triton(
    x: Tensor, scale: Tensor, amax: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *wanted, record = how
    used, row, col = _measured_program(x, record, *wanted)(x, scale, amax)
    if record:
        torch.autograd.graph.increment_version(amax)  # as PyTorch does
    return used, row, col


@planned
def _program(x: Slot, rounded: bool, *wanted: Any) -> Program:
    scale = Slot(torch.float32)
    planned = casting(x, *wanted, scale=scale, rounded=rounded)
    return Program([x, scale], *planned, anywhere=1)


@planned
def _measured_program(x: Slot, record: bool | None, *wanted: Any) -> Callable[..., Any]:
    """Measure and cast ``x``; with ``record``, which is None without, there is a history."""
    dtype, row, col, pad_rows, power_of_2 = wanted
    how: list[Any] = [*wanted, record]
    delayed = record is not None
    if 0 in x.shape and delayed:
        return lambda *given: cast_delayed_reference(*given, *how)
    if 0 in x.shape:
        return lambda x: cast_reference(x, None, dtype, row, col, pad_rows, None, power_of_2)
    if not is_dense(x.shape, x.strides):

        def of_copy(x: Tensor, *state: Tensor) -> Any:
            x = x.contiguous()
            return _measured_program(x, record, *wanted)(x, *state)

        return of_copy
    scale, amax = history = [Slot(torch.float32) if delayed else None for _ in range(2)]
    parts, measure = measuring(x, scale)
    amax = amax if record else None
    results, launches = casting(x, *wanted, scale=scale, parts=parts, amax=amax)
    if delayed:
        results = [slot or new((0,), x.dtype) for slot in results]
    return Program([x, *history], results, [measure, *launches], anywhere=2 * delayed)


register("cast", cast_reference, triton=_cast_triton, fake=_cast_fake)
register(
    "cast_delayed",
    cast_delayed_reference,
    triton=_cast_delayed_triton,
    fake=_cast_delayed_fake,
    writes=("amax",),
)
