"""Choose the scale of a tensor, cast it to float8 and lay it out as row and column data."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.config import CastConfig, Granularity
from float8.formats import FLOAT8_MAX, GEMM_ALIGNMENT
from float8.kernels.dequantize import dequantised_by_kernel
from float8.scales import Operand, Quantized, amax_to_scale

Reduction = Callable[[Tensor], Tensor]
"""A collective function from amaxes of this rank's parts of tensors to those of the whole."""


class ScaleSource(Protocol):
    """Protocol of NamedTuples that choose the scale of per-tensor casts, and record amaxes."""

    @property
    def amax(self) -> Tensor:
        """The largest amax recorded since this 0-dim float32 tensor was made or last zeroed."""

    def cast(
        self, x: Tensor, cast_config: CastConfig, *, row: bool, col: bool, pad_rows: bool
    ) -> tuple[Operand | None, Operand | None]:
        """Cast `x` [R, C] by the stored scale or, if none is set yet, by one from the amax of `x`.

        Records that amax if recording is on. `cast_config` sets the format. Returns row data [R, C]
        (None unless `row`) and column data [C, R], the transposed copy (None unless `col`),
        zero-padded to multiples of 16; R of row data only if `pad_rows`.
        """

    def observe(self, amax: Tensor) -> None:
        """If recording is on, record `amax`, of a tensor that `self.cast` does not cast."""

    def choose(self, dynamic: Tensor) -> Tensor:
        """Return the stored scale or, if none is set yet, `dynamic`, computed from an amax."""

    def with_new_amax(self) -> "ScaleSource":
        """Return a source with the same scale and a new zero `amax`, in which its casts record."""


class Cast(NamedTuple):
    """How `quantize` casts one tensor: to which format, and where the scale comes from."""

    config: CastConfig
    """The format, the granularity, and whether scales are rounded up to powers of two."""
    source: ScaleSource | None = None
    """Has the per-tensor scale, and records the amax. None: compute the scale from the amax."""
    reduce: Reduction | None = None
    """Reduces amaxes for per-tensor scales over ranks, also if `source` is set; not finer ones."""
    scale: Tensor | None = None
    """The scale to use (for experts: [E]); if given, amax, `source` and `reduce` are not used."""


def quantize(
    x: Tensor,
    cast: Cast,
    *,
    row: bool = False,
    col: bool = False,
    pad_rows: bool = False,
    after: Tensor | None = None,
    traced: bool = False,
    via: torch.dtype | None = None,
) -> Quantized:
    """Quantize `x` [R, C] to float8 row data [R, C], column data (the transposed copy) or both.

    Dims are zero-padded to multiples of 16 or of the block size; R of row data only if `pad_rows`
    or if scales are by blocks. Returned scales are new tensors, except for a `cast.scale` given.

    Args:
        x: float32, bfloat16 or float16.
        cast: the format and granularity, and where the scale comes from.
        row: return row data.
        col: return column data.
        pad_rows: zero-pad R of row data, too, as GEMMs need for output features.
        after: a tensor that compiled code must compute before this cast, to keep it in backward;
            has no effect if `cast.source` casts.
        traced: in compiled code, compute the amax (under finer scales the whole cast, if blocks
            divide C and `x.stride(1)` is 1) by plain torch, which a compiler fuses into the
            producer of `x`; not if `x` may be empty. `cast.source` records apart from the cast.
        via: round `x` to this dtype first, as FSDP2 rounds weights before it gathers them.

    Raises:
        TypeError: `x` is not float32, bfloat16 or float16.
        ValueError: `x` is not 2-D; `row` and `col` are False; a scale is not one float32 element on
            the device of `x`; or `cast` has a source or scale, but not one scale per tensor.
    """
    config, source, reduce, scale = cast
    one_scale = config.scaling_granularity.one_scale
    traced = traced and torch.compiler.is_compiling()
    if via is not None and (via is x.dtype or source is not None or not one_scale):
        x, via = x.to(via), None  # here, since the kernel that casts will not round
    if one_scale and scale is None and (reduce is not None or traced or via is not None):
        scale = scale_of(x, cast, via)  # also records the amax in `source`
    if source is not None and scale is None:
        return Quantized(*source.cast(x, config, row=row, col=col, pad_rows=pad_rows))
    return Quantized(*kernels.cast(
        x, config, row=row, col=col, pad_rows=pad_rows, scale=scale, via=via, after=after,
        traced=traced,
    ))  # fmt: skip


def scale_of(x: Tensor, cast: Cast, via: torch.dtype | None = None) -> Tensor:
    """Return the scale by which `cast` casts `x`, or `x.to(via)`; its source records the amax."""
    amax = kernels.amax(x)
    if via is not None:  # the amax of rounded values is the rounded amax
        amax = amax.to(via).to(torch.float32)
    if cast.source is not None:
        cast.source.observe(amax)
    amax = amax if cast.reduce is None else cast.reduce(amax)
    scale = amax_to_scale(amax, cast.config.dtype, cast.config.power_of_2)
    return scale if cast.source is None else cast.source.choose(scale)


def scales_of(
    tensors: Sequence[Tensor],
    cast_config: CastConfig,
    dtype: torch.dtype,
    reduce: Reduction | None = None,
) -> list[Tensor]:
    """Return the dynamic per-tensor scales of `tensors`, 0-dim float32, by a few kernels for all.

    The tensors are not empty, and share dtype and device. Scales are for casts by `cast_config` of
    the tensors rounded to `dtype`. `reduce` takes all amaxes, float32 [len(tensors)], and returns
    their maxima over ranks. Results are views of one tensor, 16 bytes apart, for cuBLASLt.
    """
    amaxes = torch.stack(torch._foreach_norm(list(tensors), float("inf")))
    amaxes = amaxes.to(dtype).to(torch.float32)  # the amax of rounded values is the rounded amax
    if reduce is not None:
        amaxes = reduce(amaxes)
    scales = amax_to_scale(amaxes, cast_config.dtype, cast_config.power_of_2)
    return list(F.pad(scales.unsqueeze(1), (0, 3))[:, 0].unbind())


def recast(x: Tensor, cast_config: CastConfig, scale: Tensor) -> Operand:
    """Return column data (the transposed copy) of a layer's input [R, C], in backward.

    `x` is the input or its float8 row data, as saved by forward, which cast with `cast_config` and
    `scale`. Row data are converted: in compiled code, unless checkpointed, in forward, once for all
    layers that read `x`. If `x` is in high precision, it is cast; in compiled code:

    - Under one scale plain torch casts `x`, so that backward may compute `x` again from tensors
      that are kept anyway, such as the input of an activation function.
    - Under finer scales an opaque op casts `x`: unless checkpointed, it runs in forward, and its
      result is kept. It reads `x` from memory, yet is faster than compiled amaxes of columns.
    """
    if x.dtype in FLOAT8_MAX:
        return to_col(Operand(x, scale), cast_config)
    x, one_scale = x.detach(), cast_config.scaling_granularity.one_scale
    if one_scale and torch.compiler.is_compiling():
        return to_col(Operand(kernels.to_float8(x, scale, cast_config.dtype), scale), cast_config)
    return quantize(x, Cast(cast_config, scale=scale if one_scale else None), col=True).col


def padded(row: Operand, granularity: Granularity, pad_rows: bool = True) -> Operand:
    """Zero-pad columns and, if `pad_rows`, rows of 2-D data to multiples of block width, or 16."""
    data, scale = row
    multiple = granularity.width or GEMM_ALIGNMENT  # the padded sizes are multiples of it
    bottom = -data.shape[0] % multiple if pad_rows and data.dim() == 2 else 0
    right = -data.shape[-1] % multiple
    if not bottom and not right:
        return row
    if bottom and granularity.height == 1:  # scales of squares cover the new rows
        scale = F.pad(scale, (0, 0, 0, bottom), value=1.0)
    return Operand(F.pad(data.view(torch.uint8), (0, right, 0, bottom)).view(data.dtype), scale)


def to_col(row: Operand, cast_config: CastConfig, after: Tensor | None = None) -> Operand:
    """Return column data (the transposed copy) of row data [R, C] that were cast by `cast_config`.

    Bytes are transposed under one scale and square blocks. Else dequantized values are quantized:
    if scales are powers of two, this rounds only values subnormal under the scale of their column.
    Dims are padded to multiples of 16 or block sizes. Compiled code computes `after` before that.
    """
    granularity = cast_config.scaling_granularity
    if granularity.one_scale:
        return Operand(kernels.transpose_bytes(row.data, after=after), row.scale)
    if granularity.square and granularity.width is not None:
        row = padded(row, granularity)
        # `Granularity.scales` pads the last dim of scales to a multiple of 4: cut, transpose, pad.
        scale = row.scale[:, : row.data.shape[1] // granularity.width].t()
        scale = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
        return Operand(kernels.transpose_bytes(row.data, after=after), scale)
    return quantize(dequantized(row, cast_config), Cast(cast_config), col=True, after=after).col


def dequantized(row: Operand, cast_config: CastConfig) -> Tensor:
    """Return `data * scale` of `row`, in bfloat16 if `cast_config.power_of_2`, else in float32."""
    dtype = torch.bfloat16 if cast_config.power_of_2 else torch.float32  # exact for powers of 2
    return dequantised_by_kernel(row, cast_config.scaling_granularity, dtype)
