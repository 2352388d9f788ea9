"""Which layers a fused function may take, and what it needs of each."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from float8.cast import Operand, columns
from float8.linear import Float8Linear
from float8.linear.cached import PLAIN
from float8.linear.function import DelayedScales, float8_mm, transposed, trim
from float8.linear.plan import LinearPlan
from float8.linear.weight import saved_weight, transposed_weight, weight_operand
from float8.tensor import Float8GatherWeight, Float8Tensor

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks wait for a call of `module`, which a fused function does not make."""
    return any(getattr(module, hooks) for hooks in _HOOKS) or _has_any_global_hook()  # type: ignore[no-untyped-call]


class FusedLayer(NamedTuple):
    """A layer in a fused function, apart from its weight."""

    plan: LinearPlan
    scales: DelayedScales
    ready: Operand | None
    """The weight in float8, if it is that already."""

    kept_transposed: bool
    """Whether what is kept of the weight for backward is its column data."""

    in_features: int
    out_features: int
    weight_dtype: torch.dtype


def why_not_fused(*layers: nn.Module) -> str | None:
    """Say why fused functions compute with these layers one by one, or return None."""
    if not layers:
        return "there are no layers"
    config: Any = getattr(layers[0], "config", None)
    dtype: Any = None
    weights: list[Tensor] = []
    for layer in layers:
        # Exactly: a subclass (a parametrized layer, too) may compute something else.
        if not isinstance(layer, Float8Linear) or type(layer) is not Float8Linear:
            return f"one layer is a {type(layer).__name__}, not a Float8Linear"
        if "forward" in layer.__dict__:
            return "one layer has a `forward` of its own"
        if layer.config != config:
            return "the layers have different configurations"
        bias: Tensor | None = layer.bias
        if bias is not None:
            return "one layer has a bias"
        if has_hooks(layer):
            return "one layer has hooks"
        if not _may_fuse(layer.weight):
            return f"one weight is a {type(layer.weight).__name__}"
        if dtype not in (None, layer.weight.dtype):
            return "the weights have different dtypes"
        dtype = layer.weight.dtype
        if any(layer.weight is weight for weight in weights):  # Dynamo takes no tensor twice
            return "two layers share a weight"
        weights.append(layer.weight)
        plan = layer.plan
        if not all(gemm.float8 for gemm in (plan.output, plan.grad_input, plan.grad_weight)):
            return "one GEMM runs in high precision"
        if not (plan.share_input and plan.share_weight and plan.share_grad_output):
            return "one tensor is cast differently for its two GEMMs"
        if not plan.pad:
            return "pad_inner_dim is False"
    return None


def _may_fuse(weight: Tensor) -> bool:
    return type(weight) in (*PLAIN, Float8Tensor) or isinstance(weight, Float8GatherWeight)


def fusable(layers: tuple[nn.Module, ...]) -> tuple[Float8Linear, ...] | None:
    """The layers, if fused functions take them together."""
    if why_not_fused(*layers) is not None:
        return None
    return tuple(layer for layer in layers if isinstance(layer, Float8Linear))  # all of them


def compute_dtype(layer: nn.Module, x: Tensor) -> torch.dtype:
    """The dtype that a layer computes in: autocast's, or that of its weight."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # meta knows no autocast
        return torch.get_autocast_dtype(device)
    weight: Any = layer.weight
    return weight.dtype  # type: ignore[no-any-return]


def fused_layer(layer: Float8Linear, weight: Tensor) -> FusedLayer:
    """What a fused function needs of `layer` besides its weight."""
    ready = layer.ready_weight(weight)
    return FusedLayer(
        layer.plan,
        layer.delayed_scales(),
        ready,
        ready is not None and ready.col is not None,
        layer.in_features,
        layer.out_features,
        weight.dtype,
    )


def output(
    x: Operand, weight: Tensor, layer: FusedLayer, dtype: torch.dtype, record: bool
) -> tuple[Tensor, Tensor]:
    """`x @ weight.T` [M, out_features], and the weight's scale."""
    plan = layer.plan
    w = weight_operand(weight, layer.ready, plan.weight, layer.scales.weight, record)
    return trim(float8_mm(x, w, plan.output, dtype), layer.out_features), w.scale


def kept_weight(weight: Tensor, layer: FusedLayer) -> Tensor:
    """What is saved of a weight for `grad_input`."""
    return saved_weight(weight, layer.ready)


def grad_input(
    g: Operand, kept: Tensor, scale: Tensor, layer: FusedLayer, dtype: torch.dtype
) -> Tensor:
    """`g @ weight` [M, in_features]."""
    w = transposed_weight(kept, scale, layer.plan.weight, layer.kept_transposed, g.scale)
    return trim(float8_mm(g, w, layer.plan.grad_input, dtype), layer.in_features)


def with_columns(operand: Operand) -> Operand:
    """`operand` with column data made of its row data."""
    assert operand.row is not None
    return operand._replace(col=columns(operand.row))


def grad_weight(g: Operand, x_col: Tensor, x_scale: Tensor, layer: FusedLayer) -> Tensor:
    """`g.T @ x` [out_features, in_features], dtype of the weight."""
    x = Operand(row=x_col, col=None, scale=x_scale)
    product = float8_mm(transposed(g), x, layer.plan.grad_weight, layer.weight_dtype)
    return trim(product, layer.in_features)[: layer.out_features]


def with_fresh_amax(layer: FusedLayer) -> tuple[FusedLayer, Tensor | None]:
    """`layer` recording its input's amax apart, and where: to be given to `record_input`."""
    state = layer.scales.input
    if state is None:
        return layer, None
    amax = torch.zeros_like(state.amax)
    scales = layer.scales._replace(input=state._replace(amax=amax))
    return layer._replace(scales=scales), amax


def record_input(layers: tuple[FusedLayer, ...], amax: Tensor | None) -> None:
    """Raise the input amaxes of all layers to that of the input they share."""
    for layer in layers:
        state = layer.scales.input
        if amax is not None and state is not None:
            state.amax.copy_(torch.maximum(state.amax, amax))
