"""Which layers a fused function may take, and what it needs of each."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.config import ScalingGranularity
from float8.gemm import Gemm
from float8.kernels.runtime.private import has_global_module_hooks
from float8.linear import Float8Linear, functional
from float8.linear.cached import PLAIN
from float8.linear.functional import DelayedScales
from float8.linear.plan import LinearPlan
from float8.linear.weight import weight_columns, weight_rows
from float8.quantize.spec import Part, Quantized
from float8.tensor import Float8GatherWeight, Float8Tensor

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks wait for a call of `module`, which a fused function does not make."""
    return any(getattr(module, hooks) for hooks in _HOOKS) or has_global_module_hooks()


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
        if None in (plan.output, plan.grad_input, plan.grad_weight):
            return "one GEMM runs in high precision"
        specs = (plan.input, plan.weight, plan.grad_output)
        if any(spec.granularity is not ScalingGranularity.TENSORWISE for spec in specs):
            return "scales are finer than one per tensor"
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
    x: Part, weight: Tensor, layer: FusedLayer, dtype: torch.dtype, record: bool
) -> tuple[Tensor, Tensor]:
    """`x @ weight.T` [M, out_features], and the weight's scale."""
    plan = layer.plan
    w = weight_rows(weight, layer.ready, plan.weight, layer.scales.weight, record)
    y = functional.output(x, w, _float8(plan.output), dtype, layer.out_features)
    return y, w.scale


def grad_input(
    g: Part, kept: Tensor, scale: Tensor, layer: FusedLayer, dtype: torch.dtype
) -> Tensor:
    """`g @ weight` [M, in_features]."""
    w = weight_columns(kept, scale, layer.plan.weight, layer.kept_transposed, g.scale)
    gemm = _float8(layer.plan.grad_input)
    return functional.grad_input(g, w, gemm, dtype, layer.in_features)


def grad_weight(g: Part | None, x: Part, layer: FusedLayer) -> Tensor:
    """`g.T @ x` [out_features, in_features] of column data, dtype of the weight."""
    assert g is not None
    gemm, dtype = _float8(layer.plan.grad_weight), layer.weight_dtype
    return functional.grad_weight(g, x, gemm, dtype, layer.out_features, layer.in_features)


def _float8(gemm: Gemm | None) -> Gemm:
    assert gemm is not None  # else the layers are not fused
    return gemm


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
