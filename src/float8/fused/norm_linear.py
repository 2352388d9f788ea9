"""RMSNorm and the linear layers that read it (q/k/v), in one autograd function."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.autograd import computed_before, once_differentiable, own
from float8.fused.layers import (
    FusedCall,
    Kept,
    fused_norm,
    input_columns,
    input_operand,
    take_apart,
)
from float8.fused.reasons import fusable
from float8.linear.call import KeptWeight
from float8.linear.functional import with_leading_dims
from float8.quantize.quantize import quantize


def rms_norm_linear(
    x: Tensor, norm: nn.Module, layers: Sequence[nn.Module], *, residual: bool = False
) -> tuple[Tensor, ...]:
    """Compute `[layer(norm(x)) for layer in layers]`, the normalised tensor in float8 only.

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
        TypeError, ValueError, RuntimeError: as `Float8Linear.forward`.
    """
    linears, with_norm = fusable(x, layers), None
    if linears is not None and all(layer.in_features == x.shape[-1] for layer in linears):
        with_norm = fused_norm(norm, x, linears[0])
    if linears is None or with_norm is None:
        normed = norm(x)
        outputs = tuple(layer(normed) for layer in layers)
        return (*outputs, x) if residual else outputs
    rows, weights, call = take_apart(x, linears, with_norm, residual)
    args = rows, with_norm[0], call
    computed = None
    if torch.compiler.is_compiling():
        computed = computed_before(_NormLinear, *args, *weights)
    outputs = _NormLinear.apply(*args, computed, *weights)  # type: ignore[no-untyped-call]
    products = tuple(with_leading_dims(y, x) for y in outputs[: len(linears)])
    return (*products, outputs[-1].view(x.shape)) if residual else products


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def compute(
        x: Tensor, norm_weight: Tensor, call: FusedCall, *weights: Tensor
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        x8, kept_x = input_operand(x, norm_weight, call.eps, call.layers)
        outputs: list[Tensor] = []
        kept: list[Tensor | None] = []
        for layer, weight in zip(call.layers, weights, strict=True):
            y, of_weight = layer.output(x8, weight, x.dtype, x.shape[0])  # x @ weight.T [M, N_i]
            outputs.append(y)
            kept.extend(of_weight)
        return outputs, (*kept_x, *kept)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, call: FusedCall, computed: Any, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        if computed is None:
            outputs, saved = _NormLinear.compute(x, norm_weight, call, *weights)
        else:
            outputs, saved = [own(y) for y in computed[0]], computed[1]
        # In eager mode an output without use has no gradient, not a zero one.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.call = call.for_backward()
        return (*outputs, x.view_as(x)) if call.residual else tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call: FusedCall = ctx.call
        saved = ctx.saved_tensors
        kept_x, rest, n = Kept(*saved[:6]), saved[6:], len(call.layers)
        weights = (KeptWeight(*rest[at : at + 2]) for at in range(0, 2 * n, 2))
        of_layers = tuple(zip(call.layers, weights, grad_outputs[:n], strict=True))
        x_col = None
        if any(layer.need_grad_weight and grad is not None for layer, _, grad in of_layers):
            x_col = input_columns(kept_x, call.layers[0].casts.input.spec)
        grads_x: list[Tensor] = []
        grad_weights: list[Tensor | None] = [None] * n
        for i, (layer, weight, grad) in enumerate(of_layers):
            need = layer.need_grad_weight
            if grad is None or not (call.need_grad_x or need):
                continue
            g8 = quantize(grad, layer.casts.grad_output, row=True, col=need)
            if call.need_grad_x:  # g @ weight [M, K]
                grads_x.append(layer.grad_input(g8.row, weight, grad.dtype, grad.shape[0]))
            if need and x_col is not None:
                grad_weights[i] = layer.grad_weight(g8.col, x_col)  # g.T @ x [N_i, K]
        grad_x = grad_norm = None
        residual_grad = grad_outputs[n] if call.residual else None
        if grads_x:
            of_norm = kept_x.x, kept_x.norm_weight, kept_x.rstd
            grad_x, grad_norm = kernels.rms_norm_backward(grads_x, *of_norm, residual_grad)
        elif call.need_grad_x:
            grad_x = residual_grad
        return grad_x, grad_norm, None, None, *grad_weights
