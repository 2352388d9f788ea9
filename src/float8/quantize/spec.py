"""The only description of a cast, and what casts and GEMMs hand to each other."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.config import ScalingGranularity, ScalingType


class CastSpec(NamedTuple):
    """How one tensor is cast: what its `CastConfig` comes down to."""

    dtype: torch.dtype
    """The float8 format."""

    granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    """What one scale covers."""

    scaling: ScalingType = ScalingType.DYNAMIC
    """Where the scale comes from."""

    power_of_2: bool = False
    """Whether scales are rounded up to powers of two."""

    @property
    def delayed(self) -> bool:
        """Whether the scale comes from a history of amaxes."""
        return self.scaling is ScalingType.DELAYED


class Part(NamedTuple):
    """What one GEMM reads of a tensor."""

    data: Tensor
    """[R, C] float8, contiguous along C, the contraction dim; C is padded to 16."""

    scale: Tensor
    """float32 decode scales, laid out as GEMMs read them; their shapes are in `check_scale`."""


class Quantized(NamedTuple):
    """A tensor [R, C] in float8, in the layouts that were asked for; the others are None.

    `| Any`: a type checker is not to ask of those who know which.
    """

    row: Part | Any = None
    """[R, C], contracted over C."""

    col: Part | Any = None
    """The transposed copy [C, R], contracted over R."""

    amax: Tensor | None = None
    """0-dim float32: what delayed scaling still has to record at each use, if anything."""


BLOCK = 128
"""Elements along one side of a block."""


def check_scale(part: Part, granularity: ScalingGranularity) -> None:
    """Raise a `ValueError` if the scales of data [R, C] do not have the shape of a granularity.

    One element under `TENSORWISE`; [R, 1] under `AXISWISE`, where both may have more leading dims;
    [R, ceil(C / 128)], column-major, under `BLOCK_1x128`; [ceil(R / 128), ceil(C / 128)] with the
    columns padded to 4 under `BLOCK_128x128`, as cuBLASLt wants them.
    """
    got = tuple(part.scale.shape)
    if granularity is ScalingGranularity.TENSORWISE:
        right, expected = part.scale.numel() == 1, "one element"
    elif torch.compiler.is_compiling():  # sizes may be symbols, of which nothing should be asked
        return
    else:
        *leading, C = part.data.shape
        R = leading[0]
        wanted = {
            ScalingGranularity.AXISWISE: (*leading, 1),
            ScalingGranularity.BLOCK_1x128: (R, blocks(C)),
            ScalingGranularity.BLOCK_128x128: (blocks(R), ceil4(blocks(C))),
        }[granularity]
        right, expected = got == wanted, f"shape {wanted}"
    if not right:
        raise ValueError(
            f"scale: got shape {got} for data of {tuple(part.data.shape)}, expected {expected} "
            f"under {granularity}"
        )


def dequantised(
    part: Part, granularity: ScalingGranularity, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`data * scale` in `dtype`; of any shape under `TENSORWISE`, else [R, C]."""
    scale = part.scale
    if granularity in (ScalingGranularity.BLOCK_1x128, ScalingGranularity.BLOCK_128x128):
        R, C = part.data.shape
        scale = scale.repeat_interleave(BLOCK, dim=1)[:, :C]
        if granularity is ScalingGranularity.BLOCK_128x128:
            scale = scale.repeat_interleave(BLOCK, dim=0)[:R]
    return part.data.to(dtype) * scale.to(dtype)


def blocks(n: int) -> int:
    """How many blocks of 128 cover `n`; also of symbolic sizes, without a guard."""
    return (n + (BLOCK - 1)) // BLOCK


def ceil4(n: int) -> int:
    """The smallest multiple of 4 that is not below `n`."""
    return (n + 3) // 4 * 4
