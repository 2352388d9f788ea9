"""Which layers a fused function may take, and what it needs of each."""

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from float8.cast import Operand, cast_operand, quantize
from float8.linear import Float8Linear
from float8.linear.function import DelayedScales, float8_mm, transposed, trim
from float8.linear.plan import LinearPlan

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks wait for a call of `module`, which a fused function does not make."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


class FusedLayer(NamedTuple):
    """A layer in a fused function, apart from its weight."""

    plan: LinearPlan
    scales: DelayedScales


def why_not_fused(*layers: nn.Module) -> str | None:
    """Say why fused functions compute with these layers one by one, or return None."""
    config: Any = getattr(layers[0], "config", None)
    for layer in layers:
        if not isinstance(layer, Float8Linear):
            return f"one layer is a {type(layer).__name__}, not a Float8Linear"
        if layer.config != config:
            return "the layers have different configurations"
        bias: Tensor | None = layer.bias
        if bias is not None:
            return "one layer has a bias"
        if has_hooks(layer):
            return "one layer has hooks"
        if type(layer.weight) not in PLAIN:
            return f"one weight is a {type(layer.weight).__name__}"
        plan = layer.plan
        if not all(gemm.float8 for gemm in (plan.output, plan.grad_input, plan.grad_weight)):
            return "one GEMM runs in high precision"
        if not (plan.share_input and plan.share_weight and plan.share_grad_output):
            return "one tensor is cast differently for its two GEMMs"
        if not plan.pad:
            return "pad_inner_dim is False"
    return None


def are_fused(layers: tuple[nn.Module, ...]) -> TypeGuard[tuple[Float8Linear, ...]]:
    """Whether fused functions take these layers together."""
    return why_not_fused(*layers) is None


def fused_layer(layer: Float8Linear) -> FusedLayer:
    """What a fused function needs of `layer` besides its weight."""
    return FusedLayer(layer.plan, layer.delayed_scales())


def weight_operand(weight: Tensor, layer: FusedLayer, record: bool) -> Operand:
    """Row data of a weight, for the output GEMM."""
    plan, state = layer.plan.weight, layer.scales.weight
    return quantize(weight, plan, state, row=True, pad_rows=True, record=record)


def output(
    x: Operand, w: Operand, plan: LinearPlan, out_features: int, dtype: torch.dtype
) -> Tensor:
    """`x @ w.T` [M, out_features]."""
    return trim(float8_mm(x, w, plan.output, dtype), out_features)


def grad_input(
    g: Operand, weight: Tensor, scale: Tensor, plan: LinearPlan, dtype: torch.dtype
) -> Tensor:
    """`g @ weight` [M, K]; the weight is cast again, straight to the layout needed."""
    w = cast_operand(weight, scale, plan.weight.dtype, col=True)
    return trim(float8_mm(g, transposed(w), plan.grad_input, dtype), weight.shape[1])


def grad_weight(
    g: Operand, x_col: Tensor, x_scale: Tensor, plan: LinearPlan, weight: Tensor
) -> Tensor:
    """`g.T @ x`, shape and dtype of `weight`."""
    x = Operand(row=x_col, col=None, scale=x_scale)
    product = float8_mm(transposed(g), x, plan.grad_weight, weight.dtype)
    return trim(product, weight.shape[1])[: weight.shape[0]]


def record_same_input(layers: tuple[FusedLayer, ...]) -> None:
    """Let the layers after the first know of the amax of the input that all of them share."""
    first = layers[0].scales.input
    for layer in layers[1:]:
        if first is not None and layer.scales.input is not None:
            layer.scales.input.amax.clamp_(min=first.amax)
