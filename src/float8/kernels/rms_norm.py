"""RMSNorm -> float8: one pass for the statistics, one for the cast."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from float8.kernels._cast_launch import (
    GIVEN,
    HISTORY,
    MEASURED,
    RMS_NORM,
    SPECULATIVE,
    Options,
    launch_cast,
)
from float8.kernels._checks import check_high_precision, check_scalar, describe
from float8.kernels._device import has_float8_conversion
from float8.kernels._direct import takes_triton_directly
from float8.kernels._float8 import to_float32
from float8.kernels._launch import Launch
from float8.kernels._memory import empty
from float8.kernels._triton import jit, tl
from float8.kernels.amax import MAX_PARTS, amax_reference, magnitude_bits, store_part
from float8.kernels.cast import Cast, cast_reference
from float8.kernels.cast_delayed import choose_scale_reference

WIDEST_NORM = 32768
"""Each program holds a whole row; wider ones would not fit into registers."""


class NormCast(NamedTuple):
    """A normalised tensor in float8."""

    rstd: Tensor
    """[R] float32: 1 / sqrt(mean(x ** 2) + eps)."""

    cast: Cast


def rms_norm_cast(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    round_to_power_of_2: bool = False,
    record: bool = False,
    speculative: bool = False,
) -> NormCast:
    """Cast ``x * rstd * weight``, computed in float32 (Zhang and Sennrich, 2019, eq. 4).

    To row data only: :func:`rms_norm_recast` makes the column data when backward needs them.

    Args:
        x: [R, C] float32, bfloat16 or float16, C at most `WIDEST_NORM`.
        weight: [C] float32, bfloat16 or float16.
        eps: added to the mean square.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scale: 0-dim float32, the decode scale from the history, 0 where unknown; None: the scale
            is taken from the amax of the product.
        amax: 0-dim float32, raised in place to the amax of the product; needed with ``scale``.
        round_to_power_of_2: round a scale from the amax up to a power of two.
        record: whether to write ``amax``.
        speculative: take ``scale`` for a guess: the scale from the amax is used where it is larger,
            or not a number, so that nothing saturates.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: the shapes or devices do not fit together.
    """
    args = (x, weight, eps, dtype, scale, amax, round_to_power_of_2, record, speculative)
    if takes_triton_directly(x, weight, scale, amax):
        out = rms_norm_cast_triton(*args)
    else:
        out = torch.ops.float8.rms_norm_cast.default(*args)
    return NormCast(out[0], Cast(out[1], out[2], None))


def rms_norm_recast(
    x: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Column data of what :func:`rms_norm_cast` made row data of, with the same scale.

    For backward, which has x anyway and so need not keep them.

    Args:
        x: as given to :func:`rms_norm_cast`.
        weight: likewise.
        rstd: [R] float32, as returned by it.
        scale: 0-dim float32, likewise.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        [ceil16(C), ceil16(R)] of ``dtype``.

    Raises:
        TypeError: as :func:`rms_norm_cast`.
        ValueError: as :func:`rms_norm_cast`.
    """
    if takes_triton_directly(x, weight, rstd, scale):
        return rms_norm_recast_triton(x, weight, rstd, scale, dtype)
    out: Tensor = torch.ops.float8.rms_norm_recast.default(x, weight, rstd, scale, dtype)
    return out


def check_rms_norm(x: Tensor, weight: Tensor, scale: Tensor | None, amax: Tensor | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what :func:`rms_norm_cast` cannot take."""
    check_high_precision("rms_norm_cast", x)
    if x.dim() != 2 or x.numel() == 0 or x.shape[1] > WIDEST_NORM:
        raise ValueError(
            f"rms_norm_cast: x is {describe(x)}; expected [R, C], not empty, "
            f"C at most {WIDEST_NORM}"
        )
    check_high_precision("rms_norm_cast", weight)
    if weight.shape != x.shape[1:] or weight.device != x.device:
        raise ValueError(
            f"rms_norm_cast: weight is {describe(weight)} and x {describe(x)}; expected a weight "
            f"[C] on the device of x"
        )
    if (scale is None) != (amax is None):
        raise ValueError("rms_norm_cast: got only one of scale and amax, expected both or neither")
    if scale is not None and amax is not None:
        check_scalar("scale", scale, x)
        check_scalar("amax", amax, x)


def rms_norm_cast_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """Plain-torch twin of the kernel; see :func:`rms_norm_cast`."""
    check_rms_norm(x, weight, scale, amax)
    x = x.to(torch.float32)
    rstd = torch.rsqrt(x.square().mean(dim=1) + eps)
    normed = x * rstd[:, None] * weight.to(torch.float32)
    own = amax_reference(normed)
    used = choose_scale_reference(own, dtype, scale, amax, round_to_power_of_2, record, speculative)
    row, _ = cast_reference(normed, used, dtype, row=True, col=False)
    assert row is not None
    return [rstd, used, row]


def rms_norm_cast_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """Triton kernels; see :func:`rms_norm_cast`."""
    check_rms_norm(x, weight, scale, amax)
    x, weight = x.contiguous(), weight.contiguous()
    rstd = empty((x.shape[0],), torch.float32, x.device)
    used = empty((), torch.float32, x.device)
    launch = _launch(x.shape, (x.dtype, weight.dtype), x.device, eps)
    parts = empty((launch.programs,), torch.float32, x.device)
    launch(x, weight, rstd, parts)
    # The statistics know the amax before the cast: nothing has to be done twice.
    known = SPECULATIVE if speculative else HISTORY
    options = Options(
        dtype,
        row=True,
        col=False,
        pad_rows=False,
        source=MEASURED if scale is None else known,
        parts=launch.programs,
        round_to_power_of_2=round_to_power_of_2,
        record=record and scale is not None,
        producer=RMS_NORM,
        weight_dtype=weight.dtype,
    )
    row, _ = launch_cast(
        x,
        options,
        scale=scale,
        parts=parts,
        scale_out=used,
        amax=amax,
        rstd=rstd,
        weight=weight,
    )
    if options.record:
        assert amax is not None
        torch.autograd.graph.increment_version(amax)
    assert row is not None
    return [rstd, used, row]


def rms_norm_recast_reference(
    x: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Plain-torch twin of the kernel; see :func:`rms_norm_recast`."""
    check_rms_norm(x, weight, None, None)
    check_scalar("scale", scale, x)
    normed = x.to(torch.float32) * rstd[:, None] * weight.to(torch.float32)
    _, col = cast_reference(normed, scale, dtype, row=False, col=True)
    assert col is not None
    return col


def rms_norm_recast_triton(
    x: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Triton kernel; see :func:`rms_norm_recast`."""
    check_rms_norm(x, weight, None, None)
    check_scalar("scale", scale, x)
    options = Options(
        dtype,
        row=False,
        col=True,
        pad_rows=False,
        source=GIVEN,
        producer=RMS_NORM,
        weight_dtype=weight.dtype,
    )
    x, weight = x.contiguous(), weight.contiguous()
    _, col = launch_cast(x, options, scale=scale, rstd=rstd, weight=weight)
    assert col is not None
    return col


def whole_row(C: int) -> tuple[int, int]:
    """Block size and warps of a program that holds a row of C elements in registers."""
    block = max(1 << (C - 1).bit_length(), 16)
    return block, 4 if block <= 2048 else 8 if block <= 8192 else 16


@functools.lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    eps: float,
) -> Launch:
    R, C = shape
    rows = -(-R // MAX_PARTS)
    block, num_warps = whole_row(C)
    return Launch(
        _rms_norm_kernel,
        -(-R // rows),
        device,
        (R, C),
        (eps, rows, block, has_float8_conversion(device)),
        num_warps,
        inputs=2,
    )


@jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [R, C]
    weight_ptr,  # [C]
    rstd_ptr,  # [R]
    parts_ptr,
    R,
    C,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    c = tl.arange(0, BLOCK)
    weight = to_float32(tl.load(weight_ptr + c, mask=c < C, other=0.0), HARDWARE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for row in range(ROWS):
        r = tl.program_id(0).to(tl.int64) * ROWS + row
        inside = (c < C) & (r < R)
        x = to_float32(tl.load(x_ptr + r * C + c, mask=inside, other=0.0), HARDWARE)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x) / C + EPS)
        largest = tl.maximum(largest, magnitude_bits(x * rstd * weight))
        tl.store(rstd_ptr + r, rstd, mask=r < R)
    store_part(parts_ptr, tl.max(largest), tl.float32)
