"""The input of a fused function: as it is, or through an RMSNorm."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.cast import Operand
from float8.fused.layers import FusedLayer, has_hooks
from float8.linear.cached import PLAIN
from float8.linear.function import quantize_input


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
    if torch.compiler.is_compiling() or has_hooks(module) or "forward" in module.__dict__:
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


def input_operand(
    x: Tensor,
    source: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    layer: FusedLayer,
    col: bool,
    record: bool,
) -> tuple[Operand, Tensor | None]:
    """The operand of the input of `layer`, and the norm's rstd [M] if there is a norm."""
    if norm_weight is None:
        return quantize_input(x, source, layer.plan, layer.scales, record, col), None
    plan, state = layer.plan.input, layer.scales.input
    rstd, done = kernels.rms_norm_cast(
        x,
        norm_weight,
        eps,
        plan.dtype,
        col=col,
        scale=None if state is None else state.scale,
        amax=None if state is None else state.amax,
        round_to_power_of_2=plan.round_to_power_of_2,
        record=record,
    )
    return Operand(done.row, done.col, done.scale), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` [M, K] and `weight` [K] from that of `x * rstd * weight`."""
    if x.is_cuda and grad.dtype == x.dtype == weight.dtype:
        grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
            grad, x, weight.shape, rstd[:, None], weight, [True, True]
        )
        return grad_x, grad_weight
    grad32, normed = grad.float(), x.float() * rstd[:, None]
    weighted = grad32 * weight.float()
    along = (weighted * normed).mean(dim=1, keepdim=True)
    grad_x = (weighted - normed * along) * rstd[:, None]
    return grad_x.to(x.dtype), (grad32 * normed).sum(dim=0).to(weight.dtype)
