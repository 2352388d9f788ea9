"""The SwiGLU feed-forward in one autograd function: `down(silu(gate(x)) * up(x))`.

What changes against layer by layer: `silu(gate) * up` and the gradients of gate and up exist in
float8 only, cast in the kernel that computes them; the product is not kept for backward, where
the kernel that reads gate and up anyway makes it again; x is cast once.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from float8 import kernels
from float8.cast import Operand, quantize
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


def swiglu_feed_forward(
    x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, *, norm: nn.Module | None = None
) -> Tensor:
    """`down(silu(gate(x)) * up(x))`, or with `norm` the same of `norm(x)`.

    Fused where the three layers are `Float8Linear` of one configuration, without bias or hooks;
    else computed layer by layer, so a model can call it whether it is converted or not.
    `why_not_fused(gate, up, down)` tells which. Fused, `silu(gate) * up` is not rounded to x's
    dtype before it is cast.

    Args:
        x: [..., K] float32, bfloat16 or float16; cast to autocast's dtype under autocast.
        gate: layer K -> H.
        up: layer K -> H.
        down: layer H -> N.
        norm: an `nn.RMSNorm` of x, or a module with `weight` [K], `eps` and `is_rms_norm = True`;
            fused too in eager mode where x has the compute dtype (a compiler fuses it by itself).
            Any other module is called.

    Returns:
        [..., N], dtype of the (autocast) input.

    Raises:
        TypeError: as `Float8Linear.forward`.
        ValueError: as `Float8Linear.forward`.
        RuntimeError: as `Float8Linear.forward`.
    """
    layers = fusable((gate, up, down)) if x.numel() else None
    fused_with = None
    if norm is not None:
        if layers is not None:
            fused_with = fused_norm(norm, x, compute_dtype(layers[0], x))
        x = norm(x) if fused_with is None else x
    if layers is None:
        return down(F.silu(gate(x)) * up(x))  # type: ignore[no-any-return]
    norm_weight, eps = (None, 0.0) if fused_with is None else fused_with
    source, weights = x, tuple(layer.weight for layer in layers)
    x = layers[0].check_input(x, weights[0].dtype)
    for layer in layers[1:]:
        layer.check_synced()
    grad = torch.is_grad_enabled()
    need_grad_norm = norm_weight is not None and norm_weight.requires_grad
    y = _FeedForward.apply(  # type: ignore[no-untyped-call]
        x.reshape(-1, x.shape[-1]),
        norm_weight,
        *weights,
        _Call(
            (source,),
            tuple(map(fused_layer, layers, weights)),
            eps,
            grad,
            grad and (x.requires_grad or need_grad_norm),
            tuple(grad and weight.requires_grad for weight in weights),
        ),
    )
    return y.reshape(*x.shape[:-1], -1)  # type: ignore[no-any-return]


class _Call(NamedTuple):
    """What the autograd function takes besides tensors that have gradients."""

    source: tuple[Tensor]
    layers: tuple[FusedLayer, ...]
    eps: float
    record: bool
    need_grad_x: bool
    need_grad_weights: tuple[bool, ...]


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        call: _Call,
    ) -> Tensor:
        gate, up, down = call.layers
        plan, record, dtype = gate.plan, call.record, x.dtype
        col = call.need_grad_weights[0] or call.need_grad_weights[1]
        first, amax = with_fresh_amax(gate) if record else (gate, None)
        x8, rstd = input_operand(x, call.source[0], norm_weight, call.eps, first, col, record)
        record_input((gate, up), amax)
        gate_out, gate_scale = fused.output(x8, w_gate, gate, dtype, record)
        up_out, up_scale = fused.output(x8, w_up, up, dtype, record)
        state = down.scales.input
        product = kernels.swiglu_cast(
            gate_out,
            up_out,
            plan.input.dtype,
            scale=None if state is None else state.scale,
            amax=None if state is None else state.amax,
            round_to_power_of_2=plan.input.round_to_power_of_2,
            record=record,
        )
        product8 = Operand(product.row, None, product.scale)
        y, down_scale = fused.output(product8, w_down, down, dtype, record)

        ctx.save_for_backward(
            x if norm_weight is not None else None,
            norm_weight,
            rstd,
            x8.col,
            x8.scale,
            gate_out,
            up_out,
            product.scale,
            fused.kept_weight(w_gate, gate),
            gate_scale,
            fused.kept_weight(w_up, up),
            up_scale,
            fused.kept_weight(w_down, down),
            down_scale,
        )
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        saved = ctx.saved_tensors  # once: activation checkpointing allows no second time
        x, norm_weight, rstd, x_col, x_scale, gate_out, up_out, product_scale = saved[:8]
        w_gate, gate_scale, w_up, up_scale, w_down, down_scale = saved[8:]
        del saved
        gate, up, down = call.layers
        plan, record, dtype = gate.plan, call.record, grad_output.dtype
        need_gate, need_up, need_down = call.need_grad_weights

        g8 = quantize(
            grad_output,
            plan.grad_output,
            down.scales.grad_output,
            row=True,
            col=need_down,
            record=record,
        )
        grad_product = fused.grad_input(g8, w_down, down_scale, down, dtype)
        gate_state, up_state = gate.scales.grad_output, up.scales.grad_output
        gradients = kernels.swiglu_backward_cast(
            grad_product,
            gate_out,
            up_out,
            product_scale,
            plan.input.dtype,
            plan.grad_output.dtype,
            gate_scale=None if gate_state is None else gate_state.scale,
            gate_amax=None if gate_state is None else gate_state.amax,
            up_scale=None if up_state is None else up_state.scale,
            up_amax=None if up_state is None else up_state.amax,
            round_to_power_of_2=plan.grad_output.round_to_power_of_2,
            record=record,
        )
        del grad_product, gate_out, up_out
        grad_down = grad_gate = grad_up = grad_x = grad_norm = None
        if need_down:
            grad_down = fused.grad_weight(g8, gradients.product, product_scale, down)
        del g8
        gate8 = Operand(gradients.gate.row, gradients.gate.col, gradients.gate.scale)
        up8 = Operand(gradients.up.row, gradients.up.col, gradients.up.scale)
        del gradients
        if call.need_grad_x:
            grad_x = fused.grad_input(gate8, w_gate, gate_scale, gate, dtype)
            grad_x = grad_x + fused.grad_input(up8, w_up, up_scale, up, dtype)
        if need_gate:
            grad_gate = fused.grad_weight(gate8, x_col, x_scale, gate)
        if need_up:
            grad_up = fused.grad_weight(up8, x_col, x_scale, up)
        if grad_x is not None and norm_weight is not None:
            grad_x, grad_norm = rms_norm_backward(grad_x, x, norm_weight, rstd)
        return grad_x, grad_norm, grad_gate, grad_up, grad_down, None
