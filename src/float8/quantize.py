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
"""A collective function from the amax of this rank's part of a tensor to that of the whole."""


class ScaleSource(Protocol):
    """Chooses the one scale of tensors, and observes their amaxes; a NamedTuple of tensors."""

    @property
    def amax(self) -> Tensor:
        """The largest amax recorded by `cast` and `observe` since the last sync, 0-dim float32."""

    def cast(
        self, x: Tensor, cast_config: CastConfig, *, row: bool, col: bool, pad_rows: bool
    ) -> tuple[Operand | None, Operand | None]:
        """Choose the scale of `x`, cast as `kernels.cast` does, and observe the amax."""

    def observe(self, amax: Tensor) -> None:
        """Raise `self.amax` to `amax`, that of a tensor which other code casts."""

    def choose(self, dynamic: Tensor) -> Tensor:
        """Return the scale of a tensor whose own amax gives the scale `dynamic`."""

    def apart(self) -> "ScaleSource":
        """Return a source with the same scale and a new `amax` of zero."""


class Cast(NamedTuple):
    """The format and scaling of one tensor in one call of `quantize`."""

    config: CastConfig
    """Format, granularity and scaling."""
    source: ScaleSource | None = None
    """Chooses the one scale; if None, the amax of the tensor gives the scale."""
    reduce: Reduction | None = None
    """Reduces the amax of one scale over all ranks. Also called under a `source`, since all ranks
    must take part. Finer scales are computed from this rank's part alone."""
    scale: Tensor | None = None
    """The one scale, if it is known; no amax is computed then."""


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
    """Quantize `x` [R, C] to row data, column data or both, with their scales; see `kernels.cast`.

    The scales are new tensors, which no later sync changes.

    Args:
        x: float32, bfloat16 or float16.
        cast: format, granularity and scaling.
        row: return row data.
        col: return column data.
        pad_rows: pad the rows of row data to 16, as a GEMM whose output features they are needs.
        after: a tensor that compiled code must compute before this cast.
        traced: in compiled code compute amaxes, and casts under finer scales, by plain torch, which
            a compiler fuses into the producer of `x`. The amax is recorded outside the cast,
            because backward may repeat the cast.
        via: round `x` to this dtype first, as autocast and FSDP2 round weights. Under one dynamic
            scale the kernel that casts does so.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: `x` is not 2-D; `row` and `col` are False; a scale is not one float32 element on
            the device of `x`; or a source or a scale is given under a finer granularity.
    """
    config, source, reduce, scale = cast
    one_scale = config.scaling_granularity.one_scale
    traced = traced and torch.compiler.is_compiling()
    if via is not None and (via is x.dtype or source is not None or not one_scale):
        x, via = x.to(via), None
    if one_scale and scale is None and (reduce is not None or traced or via is not None):
        scale = scale_of(x, cast, via)
    if source is not None and scale is None:
        return Quantized(*source.cast(x, config, row=row, col=col, pad_rows=pad_rows))
    return Quantized(
        *kernels.cast(
            x, config, row=row, col=col, pad_rows=pad_rows, scale=scale, via=via, after=after,
            traced=traced,
        )
    )  # fmt: skip


def scale_of(x: Tensor, cast: Cast, via: torch.dtype | None = None) -> Tensor:
    """Return the scale of `quantize` for `x` rounded to `via`; observe and reduce its amax."""
    amax = kernels.amax(x)
    if via is not None:  # rounding keeps the order of numbers
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
    """Return the dynamic scale of each tensor, 0-dim float32, computed by a few kernels for all.

    The tensors are not empty, and share dtype and device. They are rounded to `dtype` before they
    are cast. `reduce` takes all amaxes, float32 [len(tensors)], and returns those over all ranks.
    Results are views of one tensor, 16 bytes apart.
    """
    amaxes = torch.stack(torch._foreach_norm(list(tensors), float("inf")))
    # As in `scale_of`: the amax of rounded values is the rounded amax.
    amaxes = amaxes.to(dtype).to(torch.float32)
    if reduce is not None:
        amaxes = reduce(amaxes)
    scales = amax_to_scale(amaxes, cast_config.dtype, cast_config.power_of_2)
    # cuBLASLt takes scales at multiples of 16 bytes only.
    return list(F.pad(scales.unsqueeze(1), (0, 3))[:, 0].unbind())


def recast(x: Tensor, cast_config: CastConfig, scale: Tensor) -> Operand:
    """Quantize `x` [R, C] a second time, in backward, to column data; `scale` is that of forward.

    `x` may be row data, which are transposed. A compiler then keeps the transposed copy instead,
    one for all layers that read them. Else, in compiled code:

    - Under one scale plain torch casts `x`, so that a compiler may compute `x` again from what is
      kept anyway, such as the input of an activation function.
    - Under finer scales our kernel casts in forward: kernels of the compiler for the amaxes of
      columns take longer than to write and read `x`.
    """
    if x.dtype in FLOAT8_MAX:
        return to_col(Operand(x, scale), cast_config)
    x, one_scale = x.detach(), cast_config.scaling_granularity.one_scale
    if one_scale and torch.compiler.is_compiling():
        return to_col(Operand(kernels.to_float8(x, scale, cast_config.dtype), scale), cast_config)
    return quantize(x, Cast(cast_config, scale=scale if one_scale else None), col=True).col


def padded(row: Operand, granularity: Granularity, pad_rows: bool = True) -> Operand:
    """Zero-pad row data along C, and [R, C] along R if `pad_rows`; a no-op if they are aligned."""
    data, scale = row
    multiple = granularity.width or GEMM_ALIGNMENT
    bottom = -data.shape[0] % multiple if pad_rows and data.dim() == 2 else 0
    right = -data.shape[-1] % multiple
    if not bottom and not right:
        return row
    if bottom and granularity.height == 1:
        scale = F.pad(scale, (0, 0, 0, bottom), value=1.0)
    padded = F.pad(data.view(torch.uint8), (0, right, 0, bottom))
    return Operand(padded.view(data.dtype), scale)


def to_col(row: Operand, cast_config: CastConfig, after: Tensor | None = None) -> Operand:
    """Return column data of row data [R, C] that were quantized by `cast_config`.

    Under one scale and under square blocks, the bytes are transposed. Else the values are quantized
    again; if scales are powers of two, this rounds only values that are subnormal under the scale
    of their column. `after`: a tensor that compiled code must compute first; see `kernels.cast`.
    """
    granularity = cast_config.scaling_granularity
    if granularity.one_scale:
        return Operand(kernels.transpose_bytes(row.data, after=after), row.scale)
    if granularity.square and granularity.width is not None:
        row = padded(row, granularity)
        scale = row.scale[:, : row.data.shape[1] // granularity.width].t()
        scale = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
        return Operand(kernels.transpose_bytes(row.data, after=after), scale)
    return quantize(dequantized(row, cast_config), Cast(cast_config), col=True, after=after).col


def dequantized(row: Operand, cast_config: CastConfig) -> Tensor:
    """Dequantize row data, to bfloat16 if its scales are powers of two, else to float32."""
    # A float8 value times a power of two is exact in bfloat16.
    dtype = torch.bfloat16 if cast_config.power_of_2 else torch.float32
    return dequantised_by_kernel(row, cast_config.scaling_granularity, dtype)
