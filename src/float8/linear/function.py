"""The autograd function of a float8 linear layer: three named GEMMs and their casts.

What is saved for backward is float8: the transposed copy of the input, made in the same read as
its row data; or the input itself where somebody else keeps it. Of the weight only what exists
anyway is kept, see `float8.linear.weight`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from float8.cast import Operand, cast_operand, quantize
from float8.formats import FLOAT8_MAX
from float8.gemm import scaled_mm
from float8.linear.plan import GemmPlan, LinearPlan
from float8.linear.shared import keep_operand, last_operand
from float8.linear.weight import saved_weight, transposed_weight, weight_operand
from float8.scaling import DelayedScale


class DelayedScales(NamedTuple):
    """The delayed-scaling state of each cast site that owns one."""

    input: DelayedScale | None = None
    weight: DelayedScale | None = None
    grad_output: DelayedScale | None = None
    input_for_grad_weight: DelayedScale | None = None
    weight_for_grad_input: DelayedScale | None = None
    grad_output_for_grad_weight: DelayedScale | None = None


def float8_mm(a: Operand, b: Operand, gemm: GemmPlan, out_dtype: torch.dtype) -> Tensor:
    """Multiply row data of `a` with row data of `b` transposed; see `scaled_mm`."""
    assert a.row is not None
    assert b.row is not None
    return scaled_mm(
        a.row,
        a.scale,
        b.row,
        b.scale,
        out_dtype=out_dtype,
        use_fast_accum=gemm.use_fast_accum,
        emulate=gemm.emulate,
    )


def transposed(operand: Operand) -> Operand:
    """The operand of the transposed tensor: its column data are the row data."""
    return Operand(operand.col, operand.row, operand.scale)


def trim(x: Tensor, columns: int) -> Tensor:
    """Cut the columns that padding added; contiguous, so that `.view()` and in-place ops work."""
    return x if x.shape[1] == columns else x[:, :columns].contiguous()


def with_leading_dims(rows: Tensor, like: Tensor) -> Tensor:
    """[M, N] with the leading dims of `like` [..., K]; no view, since nobody else holds `rows`.

    FSDP2 warns of modules that return views, and writing into them in place is restricted.
    """
    if like.dim() == 2:
        return rows  # an op that changes nothing is still a node of the graph to issue
    shape = (*like.shape[:-1], rows.shape[1])
    return torch.ops.aten._unsafe_view.default(rows, shape)  # type: ignore[no-any-return]


def quantize_input(
    input: Tensor, source: Tensor, plan: LinearPlan, scales: DelayedScales, record: bool, col: bool
) -> Operand:
    """The operand of the input; the last layer's, if it was made of the same tensor."""
    if scales.input is not None or torch.compiler.is_compiling():
        return quantize(input, plan.input, scales.input, row=True, col=col, record=record)
    options = (plan.input, col, input.dtype)
    operand = last_operand(source, options)
    if operand is None:
        operand = quantize(input, plan.input, None, row=True, col=col)
        keep_operand(source, options, operand)
    return operand


class Float8LinearFunction(torch.autograd.Function):
    """`output = input @ weight.T` with each GEMM in float8 or high precision, as planned."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        ready: Operand | None,
        source: tuple[Tensor],
        plan: LinearPlan,
        scales: DelayedScales,
        record: bool,
        need_grad_input: bool,
        need_grad_weight: bool,
        keep_input: bool,
    ) -> Tensor:
        """`output`.

        Args:
            ctx: autograd context.
            input: [M, K], the compute dtype.
            weight: [N, K], the compute dtype, or float32 under autocast.
            ready: the weight in float8, if it is that already.
            source: the tensor that the caller gave, of which `input` is a view or a cast: what
                layers with the same input have in common. In a tuple, out of autograd's sight.
            plan: which casts and GEMMs run how.
            scales: delayed-scaling state, updated if `record`.
            record: whether amaxes are recorded.
            need_grad_input: whether backward will compute grad_input.
            need_grad_weight: whether backward will compute grad_weight.
            keep_input: save `input` itself and cast it again in backward: for one that somebody
                keeps anyway.

        Returns:
            [M, N], dtype of `input`.
        """
        float8_grad_weight = need_grad_weight and plan.grad_weight.float8
        saved_input: Tensor | None = None
        input_scale: Tensor | None = None
        weight_scale: Tensor | None = None

        if plan.output.float8:
            col = float8_grad_weight and plan.share_input and not keep_input
            x = quantize_input(input, source[0], plan, scales, record, col)
            w = weight_operand(weight, ready, plan.weight, scales.weight, record)
            output = float8_mm(x, w, plan.output, input.dtype)
            output = trim(output, weight.shape[0])
            saved_input, input_scale, weight_scale = x.col, x.scale, w.scale
        else:
            output = input @ weight.to(input.dtype).t()

        if float8_grad_weight and not plan.share_input:
            site, state = plan.input_for_grad_weight, scales.input_for_grad_weight
            x = quantize(input, site, state, col=True, record=record)
            saved_input, input_scale = x.col, x.scale
        elif need_grad_weight and (keep_input or not plan.grad_weight.float8):
            saved_input = input

        ready = ready if plan.share_weight else None
        kept = saved_weight(weight, ready) if need_grad_input else None
        ctx.save_for_backward(saved_input, input_scale, kept, weight_scale)
        ctx.weight_is_transposed = ready is not None and ready.col is not None
        ctx.plan, ctx.scales, ctx.record = plan, scales, record
        ctx.need_grad_input, ctx.need_grad_weight = need_grad_input, need_grad_weight
        ctx.in_features, ctx.weight_dtype = weight.shape[1], weight.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """`grad_input` [M, K], dtype of grad_output; `grad_weight` [N, K], dtype of weight."""
        plan: LinearPlan = ctx.plan
        scales: DelayedScales = ctx.scales
        record: bool = ctx.record
        saved_input, input_scale, weight, weight_scale = ctx.saved_tensors

        row = ctx.need_grad_input and plan.grad_input.float8
        col = ctx.need_grad_weight and plan.grad_weight.float8 and plan.share_grad_output
        if row or col:
            g = quantize(
                grad_output, plan.grad_output, scales.grad_output, row=row, col=col, record=record
            )

        grad_input = None
        if ctx.need_grad_input and plan.grad_input.float8:
            site, state = plan.weight_for_grad_input, scales.weight_for_grad_input
            if plan.share_weight:
                w = transposed_weight(weight, weight_scale, site, ctx.weight_is_transposed, g.scale)
            else:
                w = transposed(quantize(weight, site, state, col=True, record=record))
            grad_input = float8_mm(g, w, plan.grad_input, grad_output.dtype)
            grad_input = trim(grad_input, ctx.in_features)
        elif ctx.need_grad_input:
            grad_input = grad_output @ weight.to(grad_output.dtype)

        grad_weight = None
        if ctx.need_grad_weight and plan.grad_weight.float8:
            if not plan.share_grad_output:
                site = plan.grad_output_for_grad_weight
                state = scales.grad_output_for_grad_weight
                g = quantize(grad_output, site, state, col=True, record=record)
            if saved_input.dtype not in FLOAT8_MAX:
                dtype = plan.input.dtype
                saved_input = cast_operand(saved_input, input_scale, dtype, col=True).col
            x = Operand(row=saved_input, col=None, scale=input_scale)
            grad_weight = float8_mm(transposed(g), x, plan.grad_weight, ctx.weight_dtype)
            grad_weight = trim(grad_weight, ctx.in_features)
            if grad_weight.shape[0] != grad_output.shape[1]:  # padding
                grad_weight = grad_weight[: grad_output.shape[1]]
        elif ctx.need_grad_weight:
            grad_weight = (grad_output.t() @ saved_input).to(ctx.weight_dtype)

        return grad_input, grad_weight, *[None] * 8
