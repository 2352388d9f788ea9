"""Reasons why fused functions compute layers and norms one by one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.kernels.runtime.private import has_global_module_hooks, surely
from float8.linear import Float8Linear
from float8.linear.plan import LinearPlan
from float8.tensor import Float8GatherWeight, Float8Tensor, is_dtensor
from float8.tensor.held_weights import PLAIN

_WEIGHTS = (*PLAIN, Float8Tensor)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks of `module` wait for a call, which a fused function does not make."""
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    backward = (module._backward_pre_hooks, module._backward_hooks)
    return any(hooks) or any(backward)


def why_not_fused(*layers: nn.Module, norm: nn.Module | None = None) -> str | None:
    """Say why fused functions compute with these layers one by one, or return None.

    Args:
        layers: as `rms_norm_linear` or `swiglu_feed_forward` takes them, in their order.
        norm: the norm before them, if there is one.
    """
    if not layers:
        return "there are no layers"
    if norm is not None and (reason := why_norm_not_fused(norm)):
        return reason
    if has_global_module_hooks():
        return "hooks wait for calls of all modules"
    first: Any = layers[0]
    weights: list[Any] = []
    for layer in layers:
        cls = type(layer)
        # Subclasses may compute something else, as parametrized layers do.
        if not isinstance(layer, Float8Linear) or (
            cls.forward is not Float8Linear.forward or hasattr(cls, "weight")
        ):
            return f"one layer is a {cls.__name__}, not a Float8Linear"
        if "forward" in layer.__dict__:
            return "one layer has a `forward` of its own"
        if layer.config != first.config:
            return "the layers have different configurations"
        bias: Tensor | None = layer.bias
        if bias is not None:
            return "one layer has a bias"
        weight: Any = layer.weight
        if is_dtensor(weight):
            return "one weight is a DTensor: FSDP2's until it is gathered, or tensor parallel's"
        if has_hooks(layer):
            return "one layer has hooks"
        if type(weight) not in _WEIGHTS and not isinstance(weight, Float8GatherWeight):
            return f"one weight is a {type(weight).__name__}"
        if weights and weight.dtype != weights[0].dtype:
            return "the weights have different dtypes"
        # Not by `id`, with which compiled code would be that of these weights, not of all blocks.
        if any(weight is other for other in weights):  # Dynamo takes no tensor twice
            return "two layers share a weight"
        weights.append(weight)
    plan: LinearPlan = first.plan
    for gemm in (plan.output, plan.grad_input, plan.grad_weight):
        if gemm is None:
            return "one GEMM runs in high precision"
        if not (gemm.granularities[0].one_scale and gemm.granularities[1].one_scale):
            return "scales are finer than one per tensor"
    if not (plan.share_input and plan.share_weight and plan.share_grad_output):
        return "one tensor is cast differently for its two GEMMs"
    return None if plan.pad else "pad_inner_dim is False"


def why_norm_not_fused(norm: Any) -> str | None:
    """Say why a norm before layers is called by itself, or return None.

    Fused are `nn.RMSNorm`, and modules that say with an attribute `is_rms_norm = True` that they
    compute `x * rsqrt(mean(x ** 2) + eps) * weight` in float32: others that have a weight and an
    eps may compute something else.
    """
    if has_hooks(norm):
        return "the norm has hooks"
    if "forward" in norm.__dict__:
        return "the norm has a `forward` of its own"
    if type(norm) is not nn.RMSNorm and not getattr(norm, "is_rms_norm", False):
        return f"the norm is a {type(norm).__name__}, not an nn.RMSNorm"
    weight: Any = norm.weight
    if reason := why_norm_weight_not_read(weight):
        return reason
    if weight.dim() != 1 or weight.shape[0] > kernels.WIDEST_NORM:
        return f"the norm's weight has shape {tuple(weight.shape)}"
    return None


def why_norm_weight_not_read(weight: Any) -> str | None:
    """Say why a kernel does not read this weight of a norm, or return None."""
    if is_dtensor(weight):
        return "the norm's weight is a DTensor: FSDP2's until it is gathered, or tensor parallel's"
    return None if type(weight) in PLAIN else f"the norm's weight is a {type(weight).__name__}"


def fusable(x: Tensor, layers: Sequence[Any]) -> tuple[Float8Linear, ...] | None:
    """Return the layers, if fused functions take them together and x is a plain tensor of rows."""
    if x.layout is not torch.strided or x.is_nested:  # nested, or of torch.fx: layers know them
        return None
    if is_dtensor(x) or isinstance(x, Float8Tensor) or not surely(x.numel() != 0):
        return None
    return None if why_not_fused(*layers) is not None else tuple(layers)
