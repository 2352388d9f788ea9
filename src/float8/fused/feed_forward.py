"""The SwiGLU feed-forward in one autograd function: `down(silu(gate(x)) * up(x))`.

What changes against layer by layer: `silu(gate) * up` and the gradients of gate and up exist in
float8 only, cast in the kernel that computes them; the product is not kept for backward, where
the kernel that reads gate and up anyway makes it again; x is cast once, and kept in float8. Under
a compiler x itself is saved, so that the compiler can make it again from what it keeps anyway.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import kernels
from float8.fused import layers as fused
from float8.fused.layers import Call, fusable, take_apart
from float8.fused.norm import fused_norm, input_operand
from float8.linear import Float8Linear
from float8.linear.functional import with_leading_dims
from float8.linear.weight import kept_weight
from float8.once import once_differentiable
from float8.quantize.quantize import columns, quantize, recast
from float8.quantize.spec import Part


def swiglu_feed_forward(
    x: Tensor,
    gate: nn.Module,
    up: nn.Module,
    down: nn.Module,
    *,
    norm: nn.Module | None = None,
    residual: bool = False,
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
            fused too where x has the compute dtype. Any other module is called.
        residual: add x to the result; with a fused norm, backward then adds the residual
            connection's gradient in the norm's own kernel.

    Returns:
        [..., N], dtype of the (autocast) input.

    Raises:
        TypeError, ValueError, RuntimeError: as `Float8Linear.forward`.
    """
    source, layers, norm_weight, eps = x, fusable(x, (gate, up, down)), None, 0.0
    if layers is not None and not _fit(x, layers, residual):
        layers = None  # whose own forward says what is wrong
    if layers is not None:
        norm_weight, eps = fused_norm(norm, x, layers[0])
    if norm is not None and norm_weight is None:
        x = norm(x)
    if layers is None:
        y = down(F.silu(gate(x)) * up(x))
    else:
        fuse_residual = residual and norm_weight is not None
        rows, weights, call = take_apart(x, layers, norm_weight, eps, fuse_residual)
        y = _FeedForward.apply(rows, norm_weight, *weights, call)  # type: ignore[no-untyped-call]
        y = with_leading_dims(y, x)
        residual = residual and not fuse_residual
    return source + y if residual else y  # type: ignore[no-any-return]


def _fit(x: Tensor, layers: tuple[Float8Linear, ...], residual: bool) -> bool:
    gate, up, down = layers
    return (
        x.dim() > 0
        and gate.in_features == up.in_features == x.shape[-1]
        and gate.out_features == up.out_features == down.in_features
        and (down.out_features == x.shape[-1] or not residual)
    )


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        call: Call,
    ) -> Tensor:
        gate, up, down = call.layers
        plan, record, dtype = gate.plan, call.record, x.dtype
        saved_x = None if norm_weight is None else x  # makes the norm again
        col = gate.need_grad_weight or up.need_grad_weight
        if col and saved_x is None and torch.compiler.is_compiling():
            saved_x, col = x.clone(), False  # as in functional._Linear
        x8, x_col, rstd = input_operand(x, norm_weight, call, (gate, up), col)
        gate_out, gate_scale = fused.output(x8, w_gate, gate, dtype, record)
        up_out, up_scale = fused.output(x8, w_up, up, dtype, record)
        product8 = kernels.swiglu_cast(
            gate_out, up_out, plan.input, down.scales.input, record=record
        )
        y, down_scale = fused.output(product8, w_down, down, dtype, record)
        if call.residual:
            y = x + y

        weights = zip((w_gate, w_up, w_down), call.layers, strict=True)
        ctx.save_for_backward(
            *(saved_x, norm_weight, rstd, x_col, x8.scale),
            *(gate_out, up_out, product8.scale),
            *(kept_weight(weight, layer.ready) for weight, layer in weights),
            *(gate_scale, up_scale, down_scale),
        )
        ctx.call = call.for_backward()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        saved = ctx.saved_tensors  # once: activation checkpointing allows no second time
        x, norm_weight, rstd, x_col, x_scale, gate_out, up_out, product_scale = saved[:8]
        w_gate, w_up, w_down, gate_scale, up_scale, down_scale = saved[8:]
        del saved
        gate, up, down = call.layers
        plan, record, dtype = gate.plan, call.record, grad_output.dtype

        # The residual connection around it keeps grad_output alive: its column data can wait.
        spec, state = plan.grad_output, down.scales.grad_output
        g_row = quantize(grad_output, spec, row=True, state=state, record=record).row
        assert g_row is not None
        grad_product = fused.grad_input(g_row, w_down, down_scale, down, dtype)
        product8, gate8, up8 = kernels.swiglu_backward_cast(
            grad_product,
            gate_out,
            up_out,
            product_scale,
            plan.input.dtype,
            spec,
            gate.scales.grad_output,
            up.scales.grad_output,
            record=record,
        )
        del grad_product, gate_out, up_out
        grad_down = grad_gate = grad_up = grad_x = grad_norm = None
        if down.need_grad_weight:
            g_col = quantize(grad_output, spec, col=True, scale=g_row.scale).col
            grad_down = fused.grad_weight(g_col, product8, down)
            del g_col
        del g_row, product8
        of_gate = of_up = None
        if gate.need_grad_weight or up.need_grad_weight:
            if norm_weight is not None:
                x_col = kernels.rms_norm_recast(x, norm_weight, rstd, x_scale, plan.input.dtype)
            elif x_col is None:
                x_col = recast(x, plan.input, x_scale).data
            x_part = Part(x_col, x_scale)
        if call.need_grad_x:
            of_gate = fused.grad_input(gate8, w_gate, gate_scale, gate, dtype)
            of_up = fused.grad_input(up8, w_up, up_scale, up, dtype)
        if gate.need_grad_weight:
            grad_gate = fused.grad_weight(columns(gate8, gate.plan.grad_output), x_part, gate)
        del gate8
        if up.need_grad_weight:
            grad_up = fused.grad_weight(columns(up8, up.plan.grad_output), x_part, up)
        if of_gate is not None and of_up is not None:
            if norm_weight is None:
                grad_x = of_gate + of_up
            else:
                residual_grad = grad_output if call.residual else None
                grad_x, grad_norm = kernels.rms_norm_backward(
                    (of_gate, of_up), x, norm_weight, rstd, residual_grad
                )
        return grad_x, grad_norm, grad_gate, grad_up, grad_down, None
