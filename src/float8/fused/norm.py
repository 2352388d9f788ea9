"""The input of a fused function: as it is, or through an RMSNorm."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.fused.layers import FusedLayer, has_hooks
from float8.linear.cached import PLAIN
from float8.quantize.quantize import quantize
from float8.quantize.spec import Part


class Norm(NamedTuple):
    """What fused functions need of an RMSNorm."""

    weight: Tensor
    """[K]."""

    eps: float


def fused_norm(module: nn.Module, x: Tensor, compute_dtype: torch.dtype) -> Norm | None:
    """What a fused function needs of `module`, or None where it must be called by itself.

    Fused are `nn.RMSNorm`, and modules that say with an attribute `is_rms_norm = True` that they
    compute `x * rsqrt(mean(x ** 2) + eps) * weight` in float32: others that have a weight and an
    eps may compute something else.
    """
    if has_hooks(module) or "forward" in module.__dict__:
        return None
    if type(module) is not nn.RMSNorm and not getattr(module, "is_rms_norm", False):
        return None
    weight: Any = module.weight
    if type(weight) not in PLAIN or weight.dim() != 1 or weight.shape[0] > kernels.WIDEST_NORM:
        return None
    if x.dtype != compute_dtype:  # autocast: the norm takes x as it is
        return None
    eps: Any = module.eps  # None means float32's, in which torch computes
    return Norm(weight, torch.finfo(torch.float32).eps if eps is None else eps)


class Input(NamedTuple):
    """The input of a fused function: what its GEMMs multiply, and what backward needs of it."""

    row: Part
    col: Tensor | None
    """Column data, if backward needs them and they are kept; a norm's are made again."""

    rstd: Tensor | None
    """[M] float32, if there is a norm."""


def input_operand(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    layer: FusedLayer,
    col: bool,
    record: bool,
) -> Input:
    """The input of `layer`: x [M, K] or its norm."""
    spec, state = layer.plan.input, layer.scales.input
    if norm_weight is None:
        made = quantize(x, spec, row=True, col=col, state=state, record=record)
        assert made.row is not None
        return Input(made.row, None if made.col is None else made.col.data, None)
    rstd, done = kernels.rms_norm_cast(x, norm_weight, eps, spec, state, record=record)
    assert done.row is not None
    return Input(Part(done.row, done.scale), None, rstd)


def input_columns(
    col: Tensor | None,
    x: Tensor | None,
    norm_weight: Tensor | None,
    rstd: Tensor | None,
    scale: Tensor,
    layer: FusedLayer,
) -> Part:
    """Column data of the input of `layer`: as kept, or of x's norm once more."""
    if x is not None and norm_weight is not None and rstd is not None:
        col = kernels.rms_norm_recast(x, norm_weight, rstd, scale, layer.plan.input.dtype)
    assert col is not None
    return Part(col, scale)
