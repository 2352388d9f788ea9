"""Which layers fused functions may take, what an autograd function needs of them, their GEMMs."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from float8.config import ScalingGranularity
from float8.kernels.runtime.private import has_global_module_hooks
from float8.linear import Float8Linear, functional
from float8.linear.functional import DelayedScales
from float8.linear.held import PLAIN
from float8.linear.plan import LinearPlan
from float8.linear.weight import weight_columns, weight_rows
from float8.quantize.spec import Part, Quantized
from float8.tensor import Float8GatherWeight, Float8Tensor

_WEIGHTS = (*PLAIN, Float8Tensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks wait for a call of `module`, which a fused function does not make."""
    return any(getattr(module, hooks) for hooks in _HOOKS) or has_global_module_hooks()


def is_float8_linear(layer: nn.Module) -> TypeGuard[Float8Linear]:
    """Whether calling `layer` runs `Float8Linear.forward` on a weight that is stored as it is.

    Subclasses may compute something else, as parametrized layers do.
    """
    return (
        isinstance(layer, Float8Linear)
        and type(layer).forward is Float8Linear.forward
        and not hasattr(type(layer), "weight")
    )


def why_not_fused(*layers: nn.Module) -> str | None:
    """Say why fused functions compute with these layers one by one, or return None."""
    if not layers:
        return "there are no layers"
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
            return "one layer has hooks"
        weight = layer.weight
        if hasattr(weight, "device_mesh"):
            return "one weight is a DTensor: FSDP2's until it is gathered, or tensor parallel's"
        if type(weight) not in _WEIGHTS and not isinstance(weight, Float8GatherWeight):
            return f"one weight is a {type(weight).__name__}"
        if weight.dtype != first.weight.dtype:
            return "the weights have different dtypes"
        if any(weight is other for other in weights):  # Dynamo takes no tensor twice
            return "two layers share a weight"
        weights.append(weight)
    plan: LinearPlan = first.plan
    if None in (plan.output, plan.grad_input, plan.grad_weight):
        return "one GEMM runs in high precision"
    specs = (plan.input, plan.weight, plan.grad_output)
    if any(spec.granularity is not ScalingGranularity.TENSORWISE for spec in specs):
        return "scales are finer than one per tensor"
    if not (plan.share_input and plan.share_weight and plan.share_grad_output):
        return "one tensor is cast differently for its two GEMMs"
    return None if plan.pad else "pad_inner_dim is False"


def fusable(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Float8Linear, ...] | None:
    """The layers, if fused functions take them together and x has rows, in high precision."""
    if x.numel() == 0 or isinstance(x, Float8Tensor) or why_not_fused(*layers) is not None:
        return None
    return tuple(layer for layer in layers if isinstance(layer, Float8Linear))  # all of them


class FusedLayer(NamedTuple):
    """A layer in a fused function, apart from its weight."""

    plan: LinearPlan
    scales: DelayedScales
    ready: Quantized | None
    """The weight in float8, if it is that already."""

    kept_transposed: bool
    """Whether what is kept of the weight for backward is its column data."""

    in_features: int
    out_features: int
    weight_dtype: torch.dtype
    need_grad_weight: bool


class Call(NamedTuple):
    """What an autograd function takes besides tensors with gradients, and keeps."""

    layers: tuple[FusedLayer, ...]
    eps: float
    residual: bool
    record: bool
    need_grad_x: bool

    def for_backward(self) -> "Call":
        """Without what only forward reads: what is on a context lives as long as the graph."""
        return self._replace(layers=tuple(layer._replace(ready=None) for layer in self.layers))


def take_apart(
    x: Tensor,
    layers: tuple[Float8Linear, ...],
    norm_weight: Tensor | None,
    eps: float,
    residual: bool,
) -> tuple[Tensor, tuple[Tensor, ...], Call]:
    """Check `x` [..., K] as `Float8Linear.forward` does, and read each weight once.

    Returns x [M, K], in the compute dtype, and the other arguments of an autograd function.
    """
    weights = tuple(layer.weight for layer in layers)  # they may be computed
    x = functional.check_input(x, weights[0])
    grad = torch.is_grad_enabled()
    taken = []
    for layer, weight in zip(layers, weights, strict=True):
        layer.check_synced()
        ready = layer.ready_weight(weight)
        taken.append(
            FusedLayer(
                layer.plan,
                layer.delayed_scales(),
                ready,
                ready is not None and ready.col is not None,
                layer.in_features,
                layer.out_features,
                weight.dtype,
                grad and weight.requires_grad,
            )
        )
    norm_needs_grad = norm_weight is not None and norm_weight.requires_grad
    need_grad_x = grad and (x.requires_grad or norm_needs_grad)
    call = Call(tuple(taken), eps, residual, grad, need_grad_x)
    return x.reshape(-1, x.shape[-1]), weights, call


def output(
    x: Part, weight: Tensor, layer: FusedLayer, dtype: torch.dtype, record: bool
) -> tuple[Tensor, Tensor]:
    """`x @ weight.T` [M, out_features], and the weight's scale."""
    plan = layer.plan
    assert plan.output is not None  # else the layers are not fused
    w = weight_rows(weight, layer.ready, plan.weight, layer.scales.weight, record)
    y = functional.output(x, w, plan.output, dtype, x.data.shape[0], layer.out_features)
    return y, w.scale


def grad_input(
    g: Part, kept: Tensor, scale: Tensor, layer: FusedLayer, dtype: torch.dtype
) -> Tensor:
    """`g @ weight` [M, in_features]."""
    plan = layer.plan
    assert plan.grad_input is not None
    w = weight_columns(kept, scale, plan.weight, layer.kept_transposed, g.scale)
    return functional.grad_input(g, w, plan.grad_input, dtype, g.data.shape[0], layer.in_features)


def grad_weight(g: Part | None, x: Part, layer: FusedLayer) -> Tensor:
    """`g.T @ x` [out_features, in_features] of column data, dtype of the weight."""
    gemm, shape = layer.plan.grad_weight, (layer.out_features, layer.in_features)
    assert g is not None
    assert gemm is not None
    return functional.grad_weight(g, x, gemm, layer.weight_dtype, *shape)
