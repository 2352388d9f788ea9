"""RMSNorm and the linear layers that read it (q/k/v), in one autograd function."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from float8.cast import quantize
from float8.fused import layers as fused
from float8.fused.layers import (
    FusedLayer,
    compute_dtype,
    fusable,
    fused_layer,
    record_input,
    with_fresh_amax,
)
from float8.fused.norm import fused_norm, input_operand, rms_norm_backward


def rms_norm_linear(x: Tensor, norm: nn.Module, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """`[layer(norm(x)) for layer in layers]`, the normalised tensor in float8 only.

    Fused in eager mode where the layers are `Float8Linear` of one configuration, without bias or
    hooks: `why_not_fused(*layers)`. Else, and under a compiler, which fuses the norm by itself,
    computed one by one, so a model can call it whether it is converted or not.

    Args:
        x: [..., K] float32, bfloat16 or float16.
        norm: an `nn.RMSNorm`, or a module with `weight` [K], `eps` and `is_rms_norm = True`; any
            other module is called.
        layers: layers K -> N_i.

    Returns:
        One [..., N_i] per layer, dtype of the (autocast) input.

    Raises:
        TypeError: as `Float8Linear.forward`.
        ValueError: as `Float8Linear.forward`.
        RuntimeError: as `Float8Linear.forward`.
    """
    linears, fused_with = fusable(tuple(layers)) if x.numel() else None, None
    if linears is not None:
        fused_with = fused_norm(norm, x, compute_dtype(linears[0], x))
    if linears is None or fused_with is None:
        x = norm(x)
        return tuple(layer(x) for layer in layers)
    weights = tuple(layer.weight for layer in linears)
    x = linears[0].check_input(x, weights[0].dtype)
    for layer in linears[1:]:
        layer.check_synced()
    grad = torch.is_grad_enabled()
    outputs = _NormLinear.apply(  # type: ignore[no-untyped-call]
        x.reshape(-1, x.shape[-1]),
        fused_with.weight,
        _Call(
            tuple(map(fused_layer, linears, weights)),
            fused_with.eps,
            grad,
            grad and (x.requires_grad or fused_with.weight.requires_grad),
            tuple(grad and weight.requires_grad for weight in weights),
        ),
        *weights,
    )
    return tuple(y.reshape(*x.shape[:-1], -1) for y in outputs)


class _Call(NamedTuple):
    """What the autograd function takes besides tensors that have gradients."""

    layers: tuple[FusedLayer, ...]
    eps: float
    record: bool
    need_grad_x: bool
    need_grad_weights: tuple[bool, ...]


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, call: _Call, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        first, record = call.layers[0], call.record
        col = any(call.need_grad_weights)
        first, amax = with_fresh_amax(first) if record else (first, None)
        x8, rstd = input_operand(x, x, norm_weight, call.eps, first, col, record)
        record_input(call.layers, amax)
        outputs, scales = [], []
        for layer, weight in zip(call.layers, weights, strict=True):
            y, scale = fused.output(x8, weight, layer, x.dtype, record)
            outputs.append(y)
            scales.append(scale)
        ctx.set_materialize_grads(False)  # an output without use has no gradient, not a zero one
        kept = map(fused.kept_weight, weights, call.layers)
        ctx.save_for_backward(x, norm_weight, rstd, x8.col, x8.scale, *kept, *scales)
        ctx.call = call
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        x, norm_weight, rstd, x_col, x_scale, *rest = ctx.saved_tensors
        weights, scales = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        grad_x = grad_norm = None
        grad_weights: list[Tensor | None] = []
        for layer, weight, scale, need, grad in zip(
            call.layers, weights, scales, call.need_grad_weights, grad_outputs, strict=True
        ):
            if grad is None:
                grad_weights.append(None)
                continue
            plan, state = layer.plan, layer.scales.grad_output
            g8 = quantize(grad, plan.grad_output, state, row=True, col=need, record=call.record)
            if call.need_grad_x:
                part = fused.grad_input(g8, weight, scale, layer, grad.dtype)
                grad_x = part if grad_x is None else grad_x.add_(part)
            grad_weights.append(fused.grad_weight(g8, x_col, x_scale, layer) if need else None)
        if grad_x is not None:
            grad_x, grad_norm = rms_norm_backward(grad_x, x, norm_weight, rstd)
        return grad_x, grad_norm, None, *grad_weights
