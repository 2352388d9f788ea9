"""The description of a cast, and the records that casts and GEMMs hand to each other."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.config import Granularity, ScalingGranularity, ScalingType


class CastSpec(NamedTuple):
    """A `CastConfig` resolved: format, granularity and scaling of one tensor."""

    dtype: torch.dtype
    """The float8 format."""

    granularity: Granularity = ScalingGranularity.TENSORWISE
    """The block that one scale covers."""

    scaling: ScalingType = ScalingType.DYNAMIC
    """The source of the scale."""

    power_of_2: bool = False
    """Whether scales are rounded up to powers of two."""

    @property
    def delayed(self) -> bool:
        """Whether the scale comes from a history of amaxes."""
        return self.scaling is ScalingType.DELAYED


class Operand(NamedTuple):
    """One operand of a GEMM: float8 data and their scale."""

    data: Tensor
    """[R, C] float8, contiguous along C, the contraction dim; C is padded to 16."""

    scale: Tensor
    """float32 decode scales, laid out as GEMMs read them; their shapes are in `check_scale`."""


class Quantized(NamedTuple):
    """A tensor [R, C] in float8, in the layouts that were asked for; the others are None.

    `| Any`: a type checker is not to ask of those who know which.
    """

    row: Operand | Any = None
    """[R, C], contracted over C."""

    col: Operand | Any = None
    """The transposed copy [C, R], contracted over R: cast from high precision (`quantize`), or made
    of row data where only those exist (`columns`, `recast`)."""

    amax: Tensor | None = None
    """0-dim float32, for delayed scaling to record at each use; None: nothing is to be recorded."""


def check_scale(operand: Operand, granularity: Granularity) -> None:
    """Raise a `ValueError` if the scales of data [R, C] do not have the shape of a granularity.

    One element for one scale, else `Granularity.scales`; rows may have more leading dims.
    """
    if granularity.one_scale:
        right, expected = operand.scale.numel() == 1, "one element"
    elif torch.compiler.is_compiling():  # sizes may be symbols, of which nothing should be asked
        return
    else:
        wanted = granularity.scales(tuple(operand.data.shape))
        right, expected = tuple(operand.scale.shape) == wanted, f"shape {wanted}"
    if not right:
        got = f"shape {tuple(operand.scale.shape)} for data of {tuple(operand.data.shape)}"
        raise ValueError(f"scale: got {got}, expected {expected} under {granularity}")


def dequantised(
    operand: Operand, granularity: Granularity, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `data * scale` in `dtype`; of any shape under one scale or rows, else [R, C]."""
    scale = operand.scale
    if granularity.width is not None:
        scale = scale.repeat_interleave(granularity.width, dim=1)[:, : operand.data.shape[1]]
    if granularity.height not in (None, 1):
        scale = scale.repeat_interleave(granularity.height, dim=0)[: operand.data.shape[0]]
    return operand.data.to(dtype) * scale.to(dtype)
