"""Which layers and norms fused functions compute together, and why not others."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.config import ScalingGranularity
from float8.kernels.runtime.private import has_global_module_hooks
from float8.linear import Float8Linear
from float8.linear.held import PLAIN
from float8.linear.plan import LinearPlan
from float8.linear.sharded import ParallelStyle, forward_hooks
from float8.tensor import Float8GatherWeight, Float8Tensor, is_dtensor, local_tensor

_WEIGHTS = (*PLAIN, Float8Tensor)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks wait for a call of `module`, which a fused function does not make.

    Those of this library's styles do not: fused functions know what they do.
    """
    style = ParallelStyle.of(module)
    if forward_hooks(module) != ((0, 0) if style is None else style.hooks):
        return True
    return bool(module._backward_hooks or module._backward_pre_hooks) or has_global_module_hooks()


def is_float8_linear(layer: nn.Module) -> TypeGuard[Float8Linear]:
    """Whether calling `layer` runs `Float8Linear.forward` on a weight that is stored as it is.

    Subclasses may compute something else, as parametrized layers do.
    """
    return (
        isinstance(layer, Float8Linear)
        and type(layer).forward is Float8Linear.forward
        and not hasattr(type(layer), "weight")
    )


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
    first: Any = layers[0]
    weights: list[Tensor] = []
    for layer in layers:
        if not is_float8_linear(layer):
            return f"one layer is a {type(layer).__name__}, not a Float8Linear"
        if "forward" in layer.__dict__:
            return "one layer has a `forward` of its own"
        if layer.config != first.config:
            return "the layers have different configurations"
        bias: Tensor | None = layer.bias
        if bias is not None:
            return "one layer has a bias"
        if has_hooks(layer):
            but = ", other than those of Float8ColwiseParallel and Float8RowwiseParallel"
            return f"one layer has hooks{but if is_parallel(layer) else ''}"
        weight = local_tensor(layer.weight)
        if type(weight) not in _WEIGHTS and not isinstance(weight, Float8GatherWeight):
            return f"one weight is a {type(weight).__name__}"
        if weights and weight.dtype != weights[0].dtype:
            return "the weights have different dtypes"
        if any(weight is other for other in weights):  # Dynamo takes no tensor twice
            return "two layers share a weight"
        weights.append(weight)
    if any(is_parallel(layer) for layer in layers) and (reason := _why_not_parallel(*layers)):
        return reason
    plan: LinearPlan = first.plan
    if None in (plan.output, plan.grad_input, plan.grad_weight):
        return "one GEMM runs in high precision"
    specs = (plan.input, plan.weight, plan.grad_output)
    if any(spec.granularity is not ScalingGranularity.TENSORWISE for spec in specs):
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
        return "the norm has hooks; of the styles, Float8SequenceParallel's do not count"
    if "forward" in norm.__dict__:
        return "the norm has a `forward` of its own"
    if type(norm) is not nn.RMSNorm and not getattr(norm, "is_rms_norm", False):
        return f"the norm is a {type(norm).__name__}, not an nn.RMSNorm"
    weight: Any = norm.weight
    if is_dtensor(weight) and len(weight.placements) == 1 and weight.placements[0].is_replicate():
        weight = local_tensor(weight)
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


def is_parallel(layer: Any) -> bool:
    """Whether a layer has a weight, or hooks, of tensor parallel."""
    return is_dtensor(layer.weight) or layer.parallel_style is not None


def _why_not_parallel(*layers: Any) -> str | None:
    """`why_not_fused` of `Float8Linear` layers, one of which at least ranks share."""
    first, last = layers[0], layers[-1]
    for layer in layers:
        weight = layer.weight
        if not is_dtensor(weight):
            return "one weight is a DTensor, or was one, and another is not"
        if len(weight.placements) != 1 or layer.parallel_style is None:
            return "one weight is a DTensor: FSDP2's until it is gathered, or placed by hand"
        if weight.device_mesh != first.weight.device_mesh:
            return "the weights are on different meshes"
        by_rows = weight.placements[0].is_shard(0)
        if not by_rows and (layer is not last or not weight.placements[0].is_shard(1)):
            return "one weight is sharded otherwise than in q/k/v or gate/up/down"
        if by_rows and (layer.parallel_style.input, layer.gathered) != (
            first.parallel_style.input,
            first.gathered,
        ):
            return "the styles of the layers expect their input in different layouts"
    if last.weight.placements[0].is_shard(1):
        between = (last.parallel_style.input, *(x.parallel_style.output for x in layers[:-1]))
        if not all(layout.is_shard(-1) for layout in between):
            return "between the layers a style asks for another layout than Shard(-1)"
    return None


def fusable(x: Tensor, layers: Sequence[Any]) -> tuple[Float8Linear, ...] | None:
    """The layers, if fused functions take them together and x has rows, of DTensors or not."""
    if x.layout is not torch.strided or x.is_nested:  # nested, or of torch.fx: layers know them
        return None
    if x.numel() == 0 or why_not_fused(*layers) is not None:
        return None
    if is_dtensor(x) and not is_dtensor(layers[0].weight):
        return None  # they say what is wrong
    return tuple(layers)
