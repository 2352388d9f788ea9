"""Which layers fused functions may take, what an autograd function needs of them, their GEMMs.

Under tensor parallel they take a tensor where the hooks of this library's styles would hand it to
the layers, compute with what is on this rank, and hand the result to the hooks of the last layer.
What happens between the layers stays on the rank: only amaxes, as scales, are asked of all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.config import ScalingGranularity
from float8.kernels.runtime.private import has_global_module_hooks
from float8.linear import Float8Linear, functional
from float8.linear.across import HERE, Across, Copies, Reduction, Tokens, reduction
from float8.linear.functional import DelayedScales, with_leading_dims
from float8.linear.held import PLAIN
from float8.linear.plan import LinearPlan, casts_weight_dynamically
from float8.linear.sharded import (
    ParallelStyle,
    across_of,
    local_input,
    of_all_ranks,
    tokens_along,
    weight_scales,
)
from float8.linear.weight import weight_columns, weight_rows
from float8.quantize.history import DelayedScale
from float8.quantize.spec import Part, Quantized
from float8.tensor import (
    Float8GatherWeight,
    Float8Tensor,
    dtensor_like,
    is_dtensor,
    local_tensor,
)
from float8.tensor.float8_tensor import Columns

_WEIGHTS = (*PLAIN, Float8Tensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks wait for a call of `module`, which a fused function does not make.

    Those of this library's styles do not: fused functions know what they do.
    """
    style = ParallelStyle.of(module)
    own = frozenset() if style is None else style.hooks
    found = [key for hooks in _HOOKS for key in getattr(module, hooks)]
    return any(key not in own for key in found) or has_global_module_hooks()


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
            parallel = ", other than those of Float8ColwiseParallel and Float8RowwiseParallel"
            return f"one layer has hooks{parallel if is_parallel(layer) else ''}"
        weight = local_tensor(layer.weight)
        if type(weight) not in _WEIGHTS and not isinstance(weight, Float8GatherWeight):
            return f"one weight is a {type(weight).__name__}"
        if weight.dtype != first.weight.dtype:
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
    if is_dtensor(weight):
        if len(weight.placements) != 1 or not weight.placements[0].is_replicate():
            return "the norm's weight is a DTensor: FSDP2's until it is gathered, or sharded"
        weight = local_tensor(weight)
    if type(weight) not in PLAIN:
        return f"the norm's weight is a {type(weight).__name__}"
    if weight.dim() != 1 or weight.shape[0] > kernels.WIDEST_NORM:
        return f"the norm's weight has shape {tuple(weight.shape)}"
    return None


def is_parallel(layer: Any) -> bool:
    """Whether a layer has a weight, or hooks, of tensor parallel."""
    return is_dtensor(layer.weight) or layer.parallel_style is not None


def _why_not_parallel(*layers: Any) -> str | None:
    """`why_not_fused` of `Float8Linear` layers that ranks share."""
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


def fusable(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Float8Linear, ...] | None:
    """The layers, if fused functions take them together and x has rows, of DTensors or not."""
    if x.numel() == 0 or why_not_fused(*layers) is not None:
        return None
    if is_dtensor(x) and not is_dtensor(layers[0].weight):
        return None  # they say what is wrong
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
    across: Across


class Call(NamedTuple):
    """What an autograd function takes besides tensors with gradients, and keeps."""

    layers: tuple[FusedLayer, ...]
    eps: float
    residual: bool
    record: bool
    need_grad_x: bool
    everyone: Tokens | Copies | None
    """Who else has the input of a norm, or parts of it; None: nobody, or there is no norm."""

    def for_backward(self) -> "Call":
        """Without what only forward reads: what is on a context lives as long as the graph."""
        return self._replace(layers=tuple(layer._replace(ready=None) for layer in self.layers))


def placed(x: Any, *modules: Any) -> Any:
    """`x` as hooks of styles hand it to the first of `modules`, that to the next; else as it is."""
    for module in modules:
        style = ParallelStyle.of(module)
        if style is not None:
            for key, hook in module._forward_pre_hooks.items():
                if key in style.hooks:
                    x = hook(module, (x,))
    return x


def take_apart(
    x: Any,
    layers: tuple[Float8Linear, ...],
    norm_weight: Tensor | None,
    eps: float,
    residual: bool,
) -> tuple[Tensor, tuple[Tensor, ...], Call]:
    """Check `x` [..., K], `placed`, as `Float8Linear.forward` does, and read each weight once.

    Returns what this rank has of x, [M, K], in the compute dtype, and the other arguments of an
    autograd function.
    """
    for layer in layers:
        layer.check_synced()
    weights: tuple[Any, ...] = tuple(layer.weight for layer in layers)  # they may be computed
    everyone, acrosses = None, (HERE,) * len(layers)
    if is_dtensor(weights[0]):
        x, everyone, acrosses = _on_this_rank(x, weights, layers, norm_weight is not None)
        weights = tuple(weight.to_local() for weight in weights)
    x = functional.check_input(x, weights[0])
    grad = torch.is_grad_enabled()
    taken = []
    for layer, weight, across in zip(layers, weights, acrosses, strict=True):
        ready = layer.ready_weight(weight)
        taken.append(
            FusedLayer(
                layer.plan,
                layer.delayed_scales(),
                ready,
                ready is not None and ready.col is not None,
                weight.shape[1],
                weight.shape[0],
                weight.dtype,
                grad and weight.requires_grad,
                across,
            )
        )
    norm_needs_grad = norm_weight is not None and norm_weight.requires_grad
    need_grad_x = grad and (x.requires_grad or norm_needs_grad)
    call = Call(tuple(taken), eps, residual, grad, need_grad_x, everyone)
    return x.reshape(-1, x.shape[-1]), weights, call


def _on_this_rank(
    x: Any, weights: Sequence[Any], layers: Sequence[Float8Linear], before_norm: bool
) -> tuple[Tensor, Tokens | Copies | None, tuple[Across, ...]]:
    """What this rank has of x, gathered unless it is that of a norm, and how layers ask others."""
    functional.require_input(x, weights[0])  # before ranks are asked
    acrosses = tuple(
        across_of(weight, x.shape, layer.tokens_dim, layer.knows_scales, layer.weight_scale)
        for weight, layer in zip(weights, layers, strict=True)
    )
    first = layers[0]
    how = first.plan, first.delayed_scales(), first.gathered == "input", first.knows_scales
    here = None
    if not before_norm or not is_dtensor(x):  # which it refuses
        here = local_input(x, weights[0], *how)
    ready = any(isinstance(local_tensor(weight), Float8Tensor) for weight in weights)
    if first.weight_scale is None and casts_weight_dynamically(first.plan) and not ready:
        scales = weight_scales(weights, first.plan.weight)  # asked for at once
        pairs = zip(acrosses, scales, strict=True)
        acrosses = tuple(each._replace(weight_scale=scale) for each, scale in pairs)
    if here is not None:
        return here, None, acrosses
    group, (placement,) = x.device_mesh.get_group(0).group_name, x.placements
    if placement.is_replicate():
        return x.to_local(), Copies(group), acrosses
    everyone = tokens_along(placement.dim % x.dim(), x.shape, group, x.device_mesh.size())
    if not first.knows_scales:
        reduce = reduction((group,))
        acrosses = tuple(x if x.input else x._replace(input=reduce) for x in acrosses)
    return x.to_local(), everyone, acrosses


def returned(y: Tensor, like: Tensor, layer: Float8Linear, across: Across) -> Any:
    """The output [M, N] of a layer with the leading dims of `like`, and past hooks of its style."""
    y = with_leading_dims(y, like, across.output)
    if layer.parallel_style is None:
        return y
    output = of_all_ranks(y, layer.weight, across)
    for key, hook in layer._forward_hooks.items():
        if key in layer.parallel_style.hooks:
            output = hook(layer, (), output)
    if is_dtensor(output):
        return output
    # `to_local` made a view, and FSDP2 warns of modules that return one.
    return torch.ops.aten._unsafe_view.default(output, output.shape)


def like_input(rows: Tensor, x: Tensor, on_mesh: Any) -> Tensor:
    """[M, K] as x lies, which is a DTensor where x is one, `placed` as `on_mesh`."""
    if not is_dtensor(x):
        return rows.view(x.shape)
    made: Tensor = dtensor_like(rows.view(on_mesh.to_local().shape), on_mesh)
    return made


def shared_columns(x: Tensor, rows: Tensor | None) -> Columns | None:
    """Column data that others who read x make or use, too, as `functional` shares them."""
    if rows is None or not isinstance(x, Float8Tensor) or torch.compiler.is_compiling():
        return None
    return x._columns.expect()


def scale_of_all(mine: Tensor, reduce: Reduction) -> DelayedScale:
    """What makes a fused cast take the scale of the whole tensor, given that of this rank's part.

    Larger amaxes have larger scales: the largest scale is that of the largest amax.
    """
    return DelayedScale(reduce(mine), torch.empty_like(mine))


def output(
    x: Part, weight: Tensor, layer: FusedLayer, dtype: torch.dtype, record: bool
) -> tuple[Tensor, Tensor]:
    """`x @ weight.T` [M, out_features], and the weight's scale."""
    plan = layer.plan
    assert plan.output is not None  # else the layers are not fused
    across = layer.across
    w = weight_rows(
        weight, layer.ready, plan.weight, layer.scales.weight, record, across.weight,
        across.weight_scale,
    )  # fmt: skip
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
