"""Layers in a fused function: what its autograd function needs of them, and their GEMMs.

Under tensor parallel they take a tensor where the hooks of this library's styles would hand it to
the layers, compute with what is on this rank, and hand the result to the hooks of the last layer.
What happens between the layers stays on the rank: only amaxes, as scales, are asked of all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.linear import Float8Linear
from float8.linear.across import HERE, Across, Copies, Reduction, Tokens, reduction
from float8.linear.functional import (
    DelayedScales,
    check_input,
    product,
    require_input,
    with_leading_dims,
)
from float8.linear.plan import LinearPlan
from float8.linear.sharded import (
    ParallelStyle,
    across_of,
    local_input,
    of_all_ranks,
    tokens_along,
    weight_scales,
)
from float8.linear.weight import KeptWeight, kept_weight, weight_columns, weight_rows
from float8.quantize.history import DelayedScale
from float8.quantize.spec import Part, Quantized
from float8.tensor import Float8Tensor, dtensor_like, is_dtensor, local_tensor
from float8.tensor.float8_tensor import Columns


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

    def output(
        self, x: Part, weight: Tensor, dtype: torch.dtype, record: bool
    ) -> tuple[Tensor, KeptWeight]:
        """`x @ weight.T` [M, out_features], and what is kept of the weight."""
        plan = self.plan
        assert plan.output is not None  # else the layers are not fused
        w = weight_rows(weight, self.ready, plan.weight, self.scales.weight, record, self.across)
        y = product(x, w, plan.output, dtype, x.data.shape[0], self.out_features)
        return y, kept_weight(weight, self.ready, w.scale)

    def grad_input(self, g: Part, kept: KeptWeight, dtype: torch.dtype) -> Tensor:
        """`g @ weight` [M, in_features]."""
        plan = self.plan
        assert plan.grad_input is not None
        w = weight_columns(kept, plan.weight, self.scales.weight, self.kept_transposed, g.scale)
        return product(g, w, plan.grad_input, dtype, g.data.shape[0], self.in_features)

    def grad_weight(self, g: Part, x: Part) -> Tensor:
        """`g.T @ x` [out_features, in_features] of column data, dtype of the weight."""
        gemm, shape = self.plan.grad_weight, (self.out_features, self.in_features)
        assert gemm is not None
        return product(g, x, gemm, self.weight_dtype, *shape)


class Call(NamedTuple):
    """What an autograd function takes besides tensors with gradients, and keeps."""

    layers: tuple[FusedLayer, ...]
    eps: float
    residual: bool
    record: bool
    need_grad_x: bool
    everyone: Tokens | Copies | None
    """The ranks that have the input of a norm, or share its tokens; None: only this one."""

    def for_backward(self) -> "Call":
        """Without what only forward reads: what is on a context lives as long as the graph."""
        return self._replace(layers=tuple(layer._replace(ready=None) for layer in self.layers))


def placed(x: Any, *modules: Any) -> Any:
    """`x` after the input hooks of `modules`, one module after the other: all are of styles."""
    for module in modules:
        if ParallelStyle.of(module) is not None:
            for hook in module._forward_pre_hooks.values():
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
    everyone, acrosses, parts = None, (HERE,) * len(layers), weights
    if is_dtensor(weights[0]):
        x, everyone, acrosses = _on_this_rank(x, weights, layers, norm_weight is not None)
        parts = tuple(weight.to_local() for weight in weights)
    x = check_input(x, parts[0])
    grad = torch.is_grad_enabled()
    taken = []
    for layer, weight, part, across in zip(layers, weights, parts, acrosses, strict=True):
        ready = layer.ready_weight(weight, part)
        taken.append(
            FusedLayer(
                plan=layer.plan,
                scales=layer.delayed_scales(),
                ready=ready,
                kept_transposed=ready is not None and ready.col is not None,
                in_features=part.shape[1],
                out_features=part.shape[0],
                weight_dtype=part.dtype,
                need_grad_weight=grad and part.requires_grad,
                across=across,
            )
        )
    norm_needs_grad = norm_weight is not None and norm_weight.requires_grad
    need_grad_x = grad and (x.requires_grad or norm_needs_grad)
    call = Call(tuple(taken), eps, residual, grad, need_grad_x, everyone)
    return x.reshape(-1, x.shape[-1]), parts, call


def _on_this_rank(
    x: Any, weights: Sequence[Any], layers: Sequence[Float8Linear], before_norm: bool
) -> tuple[Tensor, Tokens | Copies | None, tuple[Across, ...]]:
    """What this rank has of x, who has the rest, and what each layer asks of other ranks.

    Gathered, and nobody has more, unless a norm is to read x.
    """
    require_input(x, weights[0])  # before ranks are asked
    acrosses = tuple(
        across_of(layer, weight, x.shape) for weight, layer in zip(weights, layers, strict=True)
    )
    first = layers[0]
    of_norm = before_norm and is_dtensor(x)
    if of_norm:
        here = x.to_local()
    else:  # refuses what is no DTensor
        here = local_input(first, x, weights[0], first.delayed_scales())
    ready = any(
        isinstance(local_tensor(weight), Float8Tensor) or layer.held_of(weight) is not None
        for layer, weight in zip(layers, weights, strict=True)
    )
    if first.weight_scale is None and first.plan.casts_weight_dynamically() and not ready:
        scales = weight_scales(weights, first.plan.weight)  # asked for at once
        acrosses = tuple(
            across._replace(weight_scale=scale)
            for across, scale in zip(acrosses, scales, strict=True)
        )
    if not of_norm:
        return here, None, acrosses
    group, (placement,) = x.device_mesh.get_group(0).group_name, x.placements
    if placement.is_replicate():
        return here, Copies(group), acrosses
    everyone = tokens_along(placement.dim % x.dim(), x.shape, group, x.device_mesh.size())
    if not first.knows_scales("input"):
        reduce = reduction((group,))
        acrosses = tuple(x if x.input else x._replace(input=reduce) for x in acrosses)
    return here, everyone, acrosses


def returned(y: Tensor, like: Tensor, layer: Float8Linear, across: Across) -> Any:
    """The output [M, N] with the leading dims of `like`, after the output hooks of its style."""
    y = with_leading_dims(y, like, across.output)
    if layer.parallel_style is None:
        return y
    output = of_all_ranks(y, layer.weight, across)
    for hook in layer._forward_hooks.values():
        output = hook(layer, (), output)
    if is_dtensor(output):
        return output
    # `to_local` made a view, and FSDP2 warns of modules that return one.
    return torch.ops.aten._unsafe_view.default(output, output.shape)


def like_input(rows: Tensor, x: Tensor, on_mesh: Any) -> Tensor:
    """`rows` [M, K] in the shape of x; where x is a DTensor one like `on_mesh`, x as `placed`."""
    if not is_dtensor(x):
        return rows.view(x.shape)
    made: Tensor = dtensor_like(rows.view(on_mesh.to_local().shape), on_mesh)
    return made


def shared_columns(x: Tensor, rows: Tensor | None) -> Columns | None:
    """The column data that all layers share which read the same x in float8; None: it is not."""
    if rows is None or not isinstance(x, Float8Tensor) or torch.compiler.is_compiling():
        return None
    return x._columns.expect()


def scale_of_all(mine: Tensor, reduce: Reduction) -> DelayedScale:
    """What makes a fused cast take the scale of the whole tensor, given that of this rank's part.

    Larger amaxes have larger scales: the largest scale is that of the largest amax.
    """
    return DelayedScale(reduce(mine), torch.empty_like(mine))
