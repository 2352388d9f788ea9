"""High precision -> float8 with the scale of a history, its amax recorded in the same read."""

import torch
from torch import Tensor

from float8.kernels._cast_launch import HISTORY, Options, cast_speculatively, launch_cast
from float8.kernels._checks import check_cast, check_scalar
from float8.kernels._direct import takes_triton_directly
from float8.kernels._memory import empty
from float8.kernels.amax import amax_reference, measure
from float8.kernels.cast import Cast, cast_reference, pack, unpack
from float8.scaling import amax_to_scale


def cast_delayed(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    *,
    row: bool,
    col: bool,
    pad_rows: bool = False,
    round_to_power_of_2: bool = False,
    record: bool = True,
    speculative: bool = False,
) -> Cast:
    """Cast ``x`` with a scale known beforehand, and record its amax in the same read.

    Args:
        x: [R, C] float32, bfloat16 or float16; any strides.
        scale: 0-dim float32, the decode scale from the history; where it is 0 (unknown) the
            scale is taken from the amax of ``x``, as in :func:`cast_dynamic`.
        amax: 0-dim float32, raised in place to the amax of ``x``. A NaN stays.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        row: as in :func:`cast`.
        col: as in :func:`cast`.
        pad_rows: as in :func:`cast`.
        round_to_power_of_2: for a scale taken from the amax of ``x``.
        record: whether to write ``amax``.
        speculative: take ``scale`` for a guess: cast with the scale from the amax of ``x`` where
            that is larger, or not a number, so that nothing saturates.

    Raises:
        TypeError: as :func:`cast`.
        ValueError: as :func:`cast`.
    """
    args = (
        *(x, scale, amax, dtype, row, col, pad_rows),
        *(round_to_power_of_2, record, speculative),
    )
    if takes_triton_directly(x, scale, amax):
        out = cast_delayed_triton(*args)
        return Cast(out[0], *unpack(out[1:], row, col))
    used, row_data, col_data = torch.ops.float8.cast_delayed.default(*args)
    return Cast(used, row_data if row else None, col_data if col else None)


def cast_delayed_reference(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """Plain-torch twin of the kernel; see :func:`cast_delayed`."""
    check_cast(x, dtype, row, col)
    check_scalar("scale", scale, x)
    check_scalar("amax", amax, x)
    own = amax_reference(x)
    used = choose_scale_reference(own, dtype, scale, amax, round_to_power_of_2, record, speculative)
    return pack(used, cast_reference(x, used, dtype, row=row, col=col, pad_rows=pad_rows))


def choose_scale_reference(
    own: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool,
) -> Tensor:
    """The scale of a tensor of amax ``own``: from the history if there is one; records ``own``.

    If ``speculative``, the scale from ``own`` where it is larger, NaN counting as larger still.
    """
    from_data = amax_to_scale(own, dtype, round_to_power_of_2)
    if scale is None:
        return from_data
    if record:
        assert amax is not None
        amax.copy_(torch.maximum(amax, own))
    scale = scale.reshape(())
    if speculative:  # an unknown scale, 0, is smaller than any
        return torch.where(from_data <= scale, scale, from_data)
    return torch.where(scale == 0.0, from_data, scale)


def cast_delayed_triton(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    row: bool,
    col: bool,
    pad_rows: bool,
    round_to_power_of_2: bool,
    record: bool,
    speculative: bool = False,
) -> list[Tensor]:
    """Triton kernels; see :func:`cast_delayed`."""
    check_cast(x, dtype, row, col)
    check_scalar("scale", scale, x)
    check_scalar("amax", amax, x)
    if x.numel() == 0:
        return cast_delayed_reference(
            x, scale, amax, dtype, row, col, pad_rows, round_to_power_of_2, record, speculative
        )
    options = Options(
        dtype, row, col, pad_rows, round_to_power_of_2=round_to_power_of_2, record=record
    )
    if speculative:
        used, data = cast_speculatively(x, options, scale, amax)
    else:
        parts = measure(x, known_scale=scale)
        used = empty((), torch.float32, x.device)
        options = options._replace(source=HISTORY, parts=parts.numel())
        data = launch_cast(x, options, scale=scale, parts=parts, scale_out=used, amax=amax)
    if record:
        torch.autograd.graph.increment_version(amax)  # as PyTorch's own in-place ops do
    return pack(used, data)
