"""Cast with delayed scaling: quantize with the stored scale, and record the amax."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.config import CastConfig
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.amax import amax_reference
from float8.kernels.cast import (
    SCALAR,
    CastArguments,
    cast_plan,
    cast_reference,
    refusal,
    refused_scale,
    specs_of,
)
from float8.kernels.runtime.launch import takes_triton_directly
from float8.kernels.runtime.ops import register
from float8.scales import Operand, amax_to_scale

UNKNOWN_SCALE = 0.0
"""The value of a scale that is not set yet; casts then compute a scale from the data. Unlike a
Python flag, this value is saved in checkpoints and read by compiled graphs."""


class DelayedScale(NamedTuple):
    """Delayed scaling of one tensor: a stored scale, and a tensor in which casts record amaxes."""

    scale: Tensor
    """Decode scale for this step, or `UNKNOWN_SCALE` (0): compute it from the data."""
    amax: Tensor
    """The largest amax recorded: a layer's buffer, zeroed by each sync, or a new tensor."""
    recording: bool = False
    """Whether casts record the amax of their tensor."""

    def cast(
        self, x: Tensor, cast_config: CastConfig, *, row: bool, col: bool, pad_rows: bool = False
    ) -> tuple[Operand | None, Operand | None]:
        """Cast `x` [R, C] by `self.scale` or, if that is 0 (not set), by a scale computed from `x`.

        Returns (data, scale) of row data [R, C], or None unless `row`, and of column data [C, R],
        the transposed copy, or None unless `col`. Sizes are zero-padded to multiples of 16, R of
        row data only if `pad_rows`. `cast_config`, with one scale per tensor, sets the format and
        rounding of a computed scale. If `recording`, sets `self.amax` to max(self.amax, x's amax).
        """
        if x.dtype not in HIGH_PRECISION_DTYPES or x.dim() != 2 or not (row or col):
            raise refusal(x)
        granularity = cast_config.scaling_granularity
        for scalar in (self.scale, self.amax):
            fits = scalar.dtype == torch.float32 and scalar.numel() == 1
            if not (fits and scalar.device == x.device and granularity.one_scale):
                raise refused_scale(scalar, x, granularity)
        skips_dispatcher = x.is_cuda and takes_triton_directly(x, self.scale, self.amax)
        op = _cast_delayed_triton if skips_dispatcher else torch.ops.float8.cast_delayed.default
        arguments = cast_config.dtype, row, col, pad_rows, cast_config.power_of_2, self.recording
        scale, row_data, col_data = op(x, self.scale, self.amax, *arguments)
        return Operand(row_data, scale) if row else None, Operand(col_data, scale) if col else None

    def choose(self, dynamic: Tensor) -> Tensor:
        """Return `self.scale` or, if that is not set yet, `dynamic`, a scale computed from data."""
        return torch.where(self.scale == UNKNOWN_SCALE, dynamic, self.scale)

    def observe(self, amax: Tensor) -> None:
        """If `recording`, set `self.amax` to max(self.amax, amax), which is NaN if one is NaN."""
        if self.recording:
            self.amax.copy_(torch.maximum(self.amax, amax))

    def with_new_amax(self) -> "DelayedScale":
        """Return a copy with the same scale, whose casts always record, into a new amax of zero.

        Its casts do not write to `self.amax`, so compiled code may run them twice, for activation
        checkpointing. Afterwards the caller may pass the new amax to `self.observe`.
        """
        # Not `zeros_like`, for which compiled code would keep `self.amax` in memory.
        new_amax = torch.zeros((), dtype=torch.float32, device=self.amax.device)
        return DelayedScale(self.scale, new_amax, recording=True)


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
    """Cast `x` [R, C] in plain torch, by `scale` or, if that is 0, by a scale computed from `x`.

    Returns the scale, float8 row data [R, C] (empty unless `row`) and transposed column data [C, R]
    (empty unless `col`). Dims are zero-padded to multiples of 16, R of row data only if `pad_rows`.
    `power_of_2` rounds a computed scale up to 2**n. `record` sets `amax` to max(amax, amax of `x`).
    """
    amax_of_x = amax_reference(x)
    dynamic_scale, scale = amax_to_scale(amax_of_x, dtype, power_of_2), scale.reshape(())
    if record:
        amax.copy_(torch.maximum(amax, amax_of_x))
    used_scale = torch.where(scale == UNKNOWN_SCALE, dynamic_scale, scale)
    data = cast_reference(x, used_scale, None, None, dtype, row, col, pad_rows)  # None: one scale
    empty = x.new_empty((0,))  # auto-functionalization supports no list returns, as that of `data`
    return used_scale, data[0] if row else empty, data[-1] if col else empty


def _cast_delayed_fake(x: Tensor, scale: Tensor, amax: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    row, _, col, _ = specs_of(x.shape, CastArguments(None, None, *rest[:-1]))  # no `record`
    specs = (spec or ((0,), (1,), x.dtype) for spec in (SCALAR, row, col))
    return tuple(x.new_empty_strided(*spec[:2], dtype=spec[2]) for spec in specs)


def _cast_delayed_triton(x: Tensor, scale: Any, amax: Any, *rest: Any) -> tuple[Tensor, ...]:
    if x.numel() == 0:
        return cast_delayed_reference(x, scale, amax, *rest)
    *settings, record = rest
    source, arguments = "recorded" if record else "kept", CastArguments(None, None, *settings)
    launch = cast_plan(x.dtype, x.shape, x.stride(), x.device, source, arguments)
    used, row, _, col, _ = launch(x, scale, amax if record else None)  # no finer scales
    if record:
        torch.autograd.graph.increment_version(amax)  # as PyTorch's own ops do
    return used, x.new_empty(0) if row is None else row, x.new_empty(0) if col is None else col


register(
    "cast_delayed",
    cast_delayed_reference,
    triton=_cast_delayed_triton,
    fake=_cast_delayed_fake,
    writes=("amax",),
)
