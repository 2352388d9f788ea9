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
from float8.linear import Float8Linear
from float8.linear.call import KeptWeight, record
from float8.linear.functional import with_leading_dims
from float8.quantize.quantize import columns, quantize


def swiglu_feed_forward(
    x: Tensor,
    gate: nn.Module,
    up: nn.Module,
    down: nn.Module,
    *,
    norm: nn.Module | None = None,
    residual: bool = False,
) -> Tensor:
    """Compute `down(silu(gate(x)) * up(x))`, or with `norm` the same of `norm(x)`.

    Fused where the three layers are `Float8Linear` of one configuration, without bias or hooks;
    else computed layer by layer, so a model can call it whether it is converted or not.
    `why_not_fused(gate, up, down)` tells which. Fused, `silu(gate) * up` is not rounded to the
    dtype of x before it is cast.

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
    layers = fusable(x, (gate, up, down))
    if layers is None or not _fit(x, layers, residual):  # their own forward says what is wrong
        normed = x if norm is None else norm(x)
        y = down(F.silu(gate(normed)) * up(normed))
        return x + y if residual else y  # type: ignore[no-any-return]
    with_norm = None if norm is None else fused_norm(norm, x, layers[0])
    taken = x if norm is None or with_norm is not None else norm(x)
    fused_residual = residual and with_norm is not None
    rows, weights, call = take_apart(taken, layers, with_norm, fused_residual)
    args = rows, None if with_norm is None else with_norm[0], *weights, call
    computed = computed_before(_FeedForward, *args) if torch.compiler.is_compiling() else None
    y = _FeedForward.apply(*args, computed)  # type: ignore[no-untyped-call]
    y = with_leading_dims(y, taken)
    return x + y if residual and not fused_residual else y


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
    def compute(
        x: Tensor,
        norm_weight: Tensor | None,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        call: FusedCall,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        (gate, up, down), dtype, M = call.layers, x.dtype, x.shape[0]
        x8, kept = input_operand(x, norm_weight, call.eps, (gate, up))
        gate_out, kept_gate = gate.output(x8, w_gate, dtype, M)  # x @ w_gate.T [M, H]
        up_out, kept_up = up.output(x8, w_up, dtype, M)  # x @ w_up.T [M, H]
        cast, apart = down.casts.input, None
        if cast.state and cast.record and torch.compiler.is_compiling():
            apart = cast.state.apart()
        how = cast.spec, apart or cast.state
        product8 = kernels.swiglu_cast(gate_out, up_out, *how, record=cast.record)
        if apart:
            record(cast, apart.amax)
        y, kept_down = down.output(product8, w_down, dtype, M)  # product @ w_down.T [M, N]
        if call.residual:
            y = x + y
        of_product = gate_out, up_out, product8.scale
        return y, (*kept, *of_product, *kept_gate, *kept_up, *kept_down)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *of_compute, computed = args
        y, saved = computed or _FeedForward.compute(*of_compute)
        ctx.save_for_backward(*saved)
        ctx.call = of_compute[-1].for_backward()
        return y if computed is None else own(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: FusedCall = ctx.call
        saved = ctx.saved_tensors  # once: activation checkpointing allows no second time
        kept = Kept(*saved[:6])
        gate_out, up_out, product_scale = saved[6:9]
        w_gate, w_up = KeptWeight(*saved[9:11]), KeptWeight(*saved[11:13])
        w_down = KeptWeight(*saved[13:])
        del saved
        (gate, up, down), dtype, M = call.layers, grad_output.dtype, grad_output.shape[0]

        # The residual connection around it keeps grad_output alive: column data can wait.
        cast = down.casts.grad_output
        g_row = quantize(grad_output, cast, row=True).row
        grad_product = down.grad_input(g_row, w_down, dtype, M)  # g @ w_down [M, H]
        of_gate, of_up = gate.casts.grad_output, up.casts.grad_output
        product8, gate8, up8 = kernels.swiglu_backward_cast(
            grad_product, gate_out, up_out, product_scale, gate.casts.input.spec.dtype,
            of_gate.spec, of_gate.state, of_up.state, record=of_gate.record,
        )  # fmt: skip
        del grad_product, gate_out, up_out
        grad_down = grad_gate = grad_up = grad_x = grad_norm = None
        if down.need_grad_weight:
            g_col = quantize(grad_output, cast.known(g_row.scale), col=True).col
            grad_down = down.grad_weight(g_col, product8)  # g.T @ product [N, H]
            del g_col
        del g_row, product8
        from_gate = from_up = None
        if gate.need_grad_weight or up.need_grad_weight:
            x_col = input_columns(kept, gate.casts.input.spec)
        if call.need_grad_x:
            from_gate = gate.grad_input(gate8, w_gate, dtype, M)  # g_gate @ w_gate [M, K]
            from_up = up.grad_input(up8, w_up, dtype, M)  # g_up @ w_up [M, K]
        if gate.need_grad_weight:  # g_gate.T @ x [H, K]
            grad_gate = gate.grad_weight(columns(gate8, of_gate.spec), x_col)
        del gate8
        if up.need_grad_weight:  # g_up.T @ x [H, K]
            grad_up = up.grad_weight(columns(up8, of_up.spec), x_col)
        if from_gate is not None and from_up is not None:
            if kept.x is None:
                grad_x = from_gate + from_up
            else:
                residual_grad = grad_output if call.residual else None
                of_norm = kept.x, kept.norm_weight, kept.rstd
                grads = [from_gate, from_up]
                grad_x, grad_norm = kernels.rms_norm_backward(grads, *of_norm, residual_grad)
        return grad_x, grad_norm, grad_gate, grad_up, grad_down, None, None
