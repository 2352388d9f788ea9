"""RMSNorm -> float8: one pass for the statistics, one for the cast."""

import functools

import torch
from torch import Tensor

from float8.kernels.amax import MAX_PARTS, magnitude_bits, store_part
from float8.kernels.cast import (
    GIVEN,
    HISTORY,
    MEASURED,
    RMS_NORM,
    Kind,
    allocate,
    cast_dynamic_fake,
    cast_reference,
    launch_cast,
    rows_reference,
)
from float8.kernels.checks import check_high_precision, check_scalar, check_state, describe
from float8.kernels.numeric import to_float32
from float8.kernels.runtime.device import has_float8_conversion
from float8.kernels.runtime.launch import Launch, empty, takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.kernels.runtime.triton import jit, tl
from float8.quantize.history import NO_STATE, DelayedScale
from float8.quantize.spec import CastSpec, Part

WIDEST_NORM = 32768
"""Each program holds a whole row; wider ones would not fit into registers."""


def rms_norm_cast(
    x: Tensor,
    weight: Tensor,
    eps: float,
    spec: CastSpec,
    state: DelayedScale | None = None,
    *,
    record: bool = False,
) -> tuple[Tensor, Part]:
    """Cast ``x * rstd * weight``, computed in float32 (Zhang and Sennrich, 2019, eq. 4).

    To row data only: :func:`rms_norm_recast` makes the column data when backward needs them.

    Args:
        x: [R, C] float32, bfloat16 or float16, C at most `WIDEST_NORM`.
        weight: [C] float32, bfloat16 or float16.
        eps: added to the mean square.
        spec: format, and whether a scale from the amax is rounded up to a power of two.
        state: of delayed scaling, as in `cast_delayed`; None: the scale is taken from the amax of
            the product.
        record: whether to raise the amax of ``state``.

    Returns:
        rstd [R] float32, ``1 / sqrt(mean(x ** 2) + eps)``; and row data [R, ceil16(C)].

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: the shapes or devices do not fit together.
    """
    check_rms_norm(x, weight)
    check_state(state, x)
    scale, amax = state or NO_STATE
    args = (x, weight, eps, spec.dtype, scale, amax, spec.power_of_2, record)
    if x.is_cuda and takes_triton_directly(x, weight, scale, amax):
        out = _rms_norm_cast_triton(*args)
    else:
        out = torch.ops.float8.rms_norm_cast.default(*args)
    return out[0], Part(out[2], out[1])


def rms_norm_recast(
    x: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Column data of what :func:`rms_norm_cast` made row data of, with the same scale.

    For backward, which has x anyway and so need not keep them: [ceil16(C), ceil16(R)] from what
    :func:`rms_norm_cast` was given and returned.
    """
    check_rms_norm(x, weight)
    check_scalar("scale", scale, x)
    args = (x, weight, rstd, scale, dtype)
    if x.is_cuda and takes_triton_directly(x, weight, rstd, scale):
        return _rms_norm_recast_triton(*args)
    out: Tensor = torch.ops.float8.rms_norm_recast.default(*args)
    return out


def check_rms_norm(x: Tensor, weight: Tensor) -> None:
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


def rms_norm_cast_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    power_of_2: bool,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain-torch twin of :func:`rms_norm_cast`: rstd, the scale used, row data."""
    x = x.to(torch.float32)
    rstd = torch.rsqrt(x.square().mean(dim=1) + eps)
    normed = x * rstd[:, None] * weight.to(torch.float32)
    return rstd, *rows_reference(normed, dtype, scale, amax, power_of_2, record)


def rms_norm_recast_reference(
    x: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Plain-torch twin of :func:`rms_norm_recast`."""
    normed = x.to(torch.float32) * rstd[:, None] * weight.to(torch.float32)
    return cast_reference(normed, scale, dtype, False, True)[0]


def _rms_norm_cast_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    power_of_2: bool,
    record: bool,
) -> tuple[Tensor, ...]:
    x, weight = x.contiguous(), weight.contiguous()
    rstd = empty((x.shape[0],), torch.float32, x)
    launch = _launch(x.shape, (x.dtype, weight.dtype), x.device, eps)
    parts = empty((launch.programs,), torch.float32, x)
    launch(x, weight, rstd, parts)
    # The statistics know the amax before the cast: nothing has to be done twice.
    kind = Kind(
        MEASURED if scale is None else HISTORY,
        launch.programs,
        dtype,
        row=True,
        col=False,
        power_of_2=power_of_2,
        record=record and amax is not None,
        producer=RMS_NORM,
        weight_dtype=weight.dtype,
    )
    made = launch_cast(x, kind, scale=scale, parts=parts, amax=amax, rstd=rstd, weight=weight)
    return rstd, *made


def _rms_norm_recast_triton(
    x: Tensor, weight: Tensor, rstd: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    kind = Kind(GIVEN, 0, dtype, False, True, producer=RMS_NORM, weight_dtype=weight.dtype)
    return launch_cast(x, kind, scale=scale, rstd=rstd, weight=weight)[0]


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
        (R, C, rows),
        (eps, block, has_float8_conversion(device)),
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
    rows,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    c = tl.arange(0, BLOCK)
    weight = to_float32(tl.load(weight_ptr + c, mask=c < C, other=0.0), HARDWARE)
    largest = tl.zeros((BLOCK,), tl.int32)
    r = tl.program_id(0).to(tl.int64) * rows
    end = r + rows
    while r < end:  # Triton's interpreter (3.6) takes no range of tensors
        inside = (c < C) & (r < R)
        x = to_float32(tl.load(x_ptr + r * C + c, mask=inside, other=0.0), HARDWARE)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x) / C + EPS)
        largest = tl.maximum(largest, magnitude_bits(x * rstd * weight))
        tl.store(rstd_ptr + r, rstd, mask=r < R)
        r += 1
    store_part(parts_ptr, tl.max(largest), tl.float32)


register(
    "rms_norm_cast",
    rms_norm_cast_reference,
    triton=_rms_norm_cast_triton,
    fake=lambda x, weight, eps, dtype, *_: (
        x.new_empty(x.shape[0], dtype=torch.float32),
        *cast_dynamic_fake(x, dtype, True, False),
    ),
    writes=("amax",),
)
register(
    "rms_norm_recast",
    rms_norm_recast_reference,
    triton=_rms_norm_recast_triton,
    fake=lambda x, weight, rstd, scale, dtype: allocate(x, dtype, False, True)[0],
)
