"""The only description of a cast, and what casts and GEMMs hand to each other."""

from typing import NamedTuple

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
    """float32 decode scale; 0-dim for `TENSORWISE`."""


class Quantized(NamedTuple):
    """A tensor [R, C] in float8, in the layouts that were asked for."""

    row: Part | None
    """[R, C], contracted over C."""

    col: Part | None
    """The transposed copy [C, R], contracted over R."""

    spec: CastSpec

    amax: Tensor | None = None
    """0-dim float32: what delayed scaling still has to record at each use, if anything."""
