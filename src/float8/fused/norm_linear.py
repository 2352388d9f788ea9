"""RMSNorm and the linear layers that read it (q/k/v), in one autograd function."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from float8 import kernels
from float8.fused import layers as fused
from float8.fused.call import Call, take_apart
from float8.fused.layers import compute_dtype, fusable, record_input, with_fresh_amax
from float8.fused.norm import fused_norm, input_columns, input_operand
from float8.linear.functional import with_leading_dims
from float8.linear.weight import kept_weight
from float8.quantize.quantize import quantize


def rms_norm_linear(
    x: Tensor, norm: nn.Module, layers: Sequence[nn.Module], *, residual: bool = False
) -> tuple[Tensor, ...]:
    """`[layer(norm(x)) for layer in layers]`, the normalised tensor in float8 only.

    Fused where the layers are `Float8Linear` of one configuration, without bias or hooks:
    `why_not_fused(*layers)`. Else computed one by one, so a model can call it whether it is
    converted or not.

    Args:
        x: [..., K] float32, bfloat16 or float16.
        norm: an `nn.RMSNorm`, or a module with `weight` [K], `eps` and `is_rms_norm = True`; any
            other module is called.
        layers: layers K -> N_i.
        residual: also return x, for the residual connection around what follows: backward then
            adds that connection's gradient in the norm's own kernel. It is a view of x: do not
            write into it in place.

    Returns:
        One [..., N_i] per layer, dtype of the (autocast) input; then x, if `residual`.

    Raises:
        TypeError: as `Float8Linear.forward`.
        ValueError: as `Float8Linear.forward`.
        RuntimeError: as `Float8Linear.forward`.
    """
    linears, fused_with = fusable(tuple(layers)) if x.numel() else None, None
    if linears is not None and all(layer.in_features == x.shape[-1] for layer in linears):
        fused_with = fused_norm(norm, x, compute_dtype(linears[0], x))
    if linears is None or fused_with is None:
        normed = norm(x)
        outputs = tuple(layer(normed) for layer in layers)
        return (*outputs, x) if residual else outputs
    rows, norm_weight, weights, call = take_apart(x, linears, fused_with, residual)
    outputs = _NormLinear.apply(rows, norm_weight, call, *weights)  # type: ignore[no-untyped-call]
    products = tuple(with_leading_dims(y, x) for y in outputs[: len(linears)])
    return (*products, outputs[-1].view(x.shape)) if residual else products


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, call: Call, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        first, record = call.layers[0], call.record
        first, amax = with_fresh_amax(first) if record else (first, None)
        x8, _, rstd = input_operand(x, norm_weight, call.eps, first, False, record)
        record_input(call.layers, amax)
        outputs, scales = [], []
        for layer, weight in zip(call.layers, weights, strict=True):
            y, scale = fused.output(x8, weight, layer, x.dtype, record)
            outputs.append(y)
            scales.append(scale)
        # In eager mode an output without use has no gradient, not a zero one.
        ctx.set_materialize_grads(False)
        kept = (kept_weight(w, layer.ready) for w, layer in zip(weights, call.layers, strict=True))
        ctx.save_for_backward(x, norm_weight, rstd, x8.scale, *kept, *scales)
        ctx.call = call.for_backward()
        return (*outputs, x.view_as(x)) if call.residual else tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        x, norm_weight, rstd, x_scale, *rest = ctx.saved_tensors
        weights, scales = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        residual_grad = grad_outputs[-1] if call.residual else None
        x_col = None
        used = [grad is not None for grad in grad_outputs[: len(call.layers)]]
        if any(need and there for need, there in zip(call.need_grad_weights, used, strict=True)):
            x_col = input_columns(None, x, norm_weight, rstd, x_scale, call.layers[0])
        grads_x: list[Tensor] = []
        grad_weights: list[Tensor | None] = []
        for layer, weight, scale, need, grad in zip(
            call.layers,
            weights,
            scales,
            call.need_grad_weights,
            grad_outputs[: len(call.layers)],
            strict=True,
        ):
            if grad is None or not (call.need_grad_x or need):
                grad_weights.append(None)
                continue
            plan, state = layer.plan, layer.scales.grad_output
            g8 = quantize(
                grad, plan.grad_output, row=True, col=need, state=state, record=call.record
            )
            assert g8.row is not None
            if call.need_grad_x:
                grads_x.append(fused.grad_input(g8.row, weight, scale, layer, grad.dtype))
            if need:
                assert x_col is not None
                grad_weights.append(fused.grad_weight(g8.col, x_col, layer))
            else:
                grad_weights.append(None)
        grad_x = grad_norm = None
        if grads_x:
            grad_x, grad_norm = kernels.rms_norm_backward(
                grads_x, x, norm_weight, rstd, residual_grad
            )
        elif residual_grad is not None and call.need_grad_x:
            grad_x = residual_grad
        return grad_x, grad_norm, None, *grad_weights
