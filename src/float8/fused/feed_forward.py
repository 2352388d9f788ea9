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
from float8.fused.input import Kept, fused_norm, input_columns, input_operand, norm_gradients
from float8.fused.layers import (
    Call,
    placed,
    returned,
    scale_of_all,
    shared_columns,
    take_apart,
)
from float8.fused.reasons import fusable, is_parallel
from float8.linear import Float8Linear
from float8.linear.functional import cast_tokens
from float8.linear.weight import KeptWeight, record_amax
from float8.quantize.history import DelayedScale
from float8.quantize.quantize import columns, quantize
from float8.tensor.float8_tensor import Columns


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

    Fused where the three layers are `Float8Linear` of one configuration, without bias or hooks
    other than those of this library's styles of tensor parallel; else computed layer by layer, so
    a model can call it whether it is converted or not. `why_not_fused(gate, up, down)` tells
    which. Fused, `silu(gate) * up` is not rounded to x's dtype before it is cast.

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
    norm_weight, eps = None, 0.0
    if norm is None:
        taken = placed(x, gate)
    elif with_norm := fused_norm(norm, x, layers[0]):
        taken, norm_weight, eps = with_norm
    else:
        taken = placed(norm(x), gate)
    rows, weights, call = take_apart(taken, layers, norm_weight, eps, residual)
    across = call.layers[-1].across
    # A sum over ranks is not there yet when x is to be added.
    fused_residual = residual and norm_weight is not None and call.everyone == across.output
    call = call._replace(residual=fused_residual)
    args = rows, norm_weight, *weights, call
    computed = computed_before(_FeedForward, *args) if torch.compiler.is_compiling() else None
    y = _FeedForward.apply(*args, computed)  # type: ignore[no-untyped-call]
    y = returned(y, taken, layers[-1], across)
    return x + y if residual and not fused_residual else y  # type: ignore[no-any-return]


def _fit(x: Tensor, layers: tuple[Float8Linear, ...], residual: bool) -> bool:
    gate, up, down = layers
    return (
        x.dim() > 0
        and gate.in_features == up.in_features == x.shape[-1]
        and gate.out_features == up.out_features == down.in_features
        and (down.out_features == x.shape[-1] or not residual)
        and down.sums_over_ranks == is_parallel(down)
    )


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def compute(
        x: Tensor,
        norm_weight: Tensor | None,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        call: Call,
    ) -> tuple[Tensor, tuple[Tensor | None, ...], Columns | None]:
        gate, up, down = call.layers
        plan, record, dtype = gate.plan, call.record, x.dtype
        x8, kept = input_operand(x, norm_weight, call, (gate, up))
        gate_out, kept_gate = gate.output(x8, w_gate, dtype, record)
        up_out, kept_up = up.output(x8, w_up, dtype, record)
        factors = gate_out, up_out
        state = down.scales.input
        apart = state.apart() if state and record and torch.compiler.is_compiling() else None
        product8 = kernels.swiglu_cast(*factors, plan.input, apart or state, record=record)
        if apart:
            record_amax(state, apart.amax)
        if down.across.input is not None:
            mine = product8.scale
            del product8
            whole = scale_of_all(mine, down.across.input)
            product8 = kernels.swiglu_cast(*factors, plan.input, whole)
        y, kept_down = down.output(product8, w_down, dtype, record)
        if down.across.output is not None:
            y = down.across.output.scatter(y)
        if call.residual:
            y = x + y

        saved = (
            *kept,
            *(gate_out, up_out, product8.scale),
            *kept_gate,
            *kept_up,
            *kept_down,
        )
        return y, saved, shared_columns(x, kept.rows)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *of_compute, computed = args
        y, saved, ctx.columns = computed or _FeedForward.compute(*of_compute)
        ctx.save_for_backward(*saved)
        ctx.call = of_compute[-1].for_backward()
        return y if computed is None else own(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        saved = ctx.saved_tensors  # once: activation checkpointing allows no second time
        kept = Kept(*saved[:6])
        gate_out, up_out, product_scale = saved[6:9]
        w_gate, w_up = KeptWeight(*saved[9:12]), KeptWeight(*saved[12:15])
        w_down = KeptWeight(*saved[15:])
        del saved
        gate, up, down = call.layers
        plan, record, dtype = gate.plan, call.record, grad_output.dtype

        spec, state, tokens = plan.grad_output, down.scales.grad_output, down.across.output
        # The residual connection around it keeps grad_output alive: column data can wait.
        g_row = cast_tokens(
            grad_output, spec, tokens, row=True, col=False, state=state, record=record,
            reduce=down.across.grad_output,
        ).row  # fmt: skip
        grad_product = down.grad_input(g_row, w_down, dtype)
        tensors = grad_product, gate_out, up_out, product_scale, plan.input.dtype, spec
        states = gate.scales.grad_output, up.scales.grad_output
        product8, gate8, up8 = kernels.swiglu_backward_cast(*tensors, *states, record=record)
        reduce = gate.across.grad_output or up.across.grad_output
        if reduce is not None:
            mine = torch.stack([gate8.scale, up8.scale])
            del product8, gate8, up8
            both, unread = scale_of_all(mine, reduce)
            # Copies: Inductor (torch 2.11) takes no view of a larger tensor for a scale.
            states = (
                DelayedScale(both[0].clone(), unread[0]),
                DelayedScale(both[1].clone(), unread[1]),
            )
            product8, gate8, up8 = kernels.swiglu_backward_cast(*tensors, *states)
        del grad_product, gate_out, up_out, tensors
        grad_down = grad_gate = grad_up = grad_x = grad_norm = None
        if down.need_grad_weight:
            if tokens is None:
                g_col = quantize(grad_output, spec, col=True, scale=g_row.scale).col
            else:
                g_col = columns(g_row, spec)
            grad_down = down.grad_weight(g_col, product8)
            del g_col
        del g_row, product8
        of_gate = of_up = None
        if gate.need_grad_weight or up.need_grad_weight:
            x_part = input_columns(kept, plan.input, ctx.columns)
        if call.need_grad_x:
            of_gate = gate.grad_input(gate8, w_gate, dtype)
            of_up = up.grad_input(up8, w_up, dtype)
        if gate.need_grad_weight:
            grad_gate = gate.grad_weight(columns(gate8, gate.plan.grad_output), x_part)
        del gate8
        if up.need_grad_weight:
            grad_up = up.grad_weight(columns(up8, up.plan.grad_output), x_part)
        if of_gate is not None and of_up is not None:
            if kept.x is None:
                grad_x = of_gate + of_up
            else:
                residual_grad = grad_output if call.residual else None
                grad_x, grad_norm = norm_gradients((of_gate, of_up), kept, call, residual_grad)
        return grad_x, grad_norm, grad_gate, grad_up, grad_down, None, None
