"""The weight of a layer in one call: what multiplies by it, and what backward keeps of it.

`Linear` asks a `Weight` for its two products and never knows which kind it is. `OnTheFly` casts in
each of them. `InFloat8` is a `Float8Tensor`: FSDP2 gathered it, or the layer has no other weight.
`float8.weights.held` adds the weights that are cast once per optimizer step.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, dtype

from float8.products import Shape
from float8.quantize import Cast
from float8.scales import Operand

if TYPE_CHECKING:
    from float8.linear.functional import Call


class Weight(Protocol):
    """A tuple of tensors or None that `save_for_backward` takes: [N, K], or [E, N, K] of experts.

    What stays on a context would live as long as the loss. So backward makes the weight anew from
    what `output` returns for it.
    """

    def output(
        self, a: Operand, shape: Shape, index: Any, call: "Call", to: dtype
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Return `a @ weight.T`, [M, N] of dtype `to`, and what backward reads of the weight."""
        ...

    def grad_input(self, g: Operand, shape: Shape, index: Any, call: "Call", to: dtype) -> Tensor:
        """Return `g @ weight`, [M, K] of dtype `to`, of row data `g` [M, N]."""
        ...


class OnTheFly(NamedTuple):
    """A weight in high precision, cast for each of its products."""

    values: Tensor | Any = None
    scale: Tensor | None = None
    """The scale that forward found, if backward casts under the same one."""

    def output(
        self, a: Operand, shape: Shape, index: Any, call: "Call", to: dtype
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Quantize the weight to row data, and multiply by it."""
        cast, gemm, products = call.casts.weight, call.plan.output, call.products
        traced = cast.state is not None  # records its amax outside of a cast that may be repeated
        b = products.quantize_weight(self.values, cast, row=True, pad_rows=True, traced=traced).row
        y = products.output(a, b, shape, *index, gemm=gemm, out_dtype=to)
        scale = None
        if call.plan.reuse_weight and cast.how.scaling_granularity.one_scale:
            scale = b.scale[:, 0].contiguous() if products.repeats_scales else b.scale
        return y, (self.values, scale)

    def grad_input(self, g: Operand, shape: Shape, index: Any, call: "Call", to: dtype) -> Any:
        """Quantize the weight to column data, and multiply by it.

        A compiler must not cast before the scale of the gradient exists. Else it casts in forward
        and keeps the result until backward, under FSDP that of every whole weight.
        """
        cast, gemm, products = call.casts.weight_for_grad_input, call.plan.grad_input, call.products
        if self.scale is not None:
            cast = Cast(cast.how, scale=self.scale)
        b = products.quantize_weight(self.values, cast, col=True, after=g.scale).col
        return products.grad_input(g, b, shape, *index, gemm=gemm, out_dtype=to)


class InFloat8(NamedTuple):
    """Row data without padding; gathered data are in FSDP2's buffer, filled again in backward."""

    data: Tensor | Any = None
    scale: Tensor | Any = None

    def output(
        self, a: Operand, shape: Shape, index: Any, call: "Call", to: dtype
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Pad the row data, and multiply by them."""
        b = call.products.padded(Operand(*self), call.casts.weight.how.scaling_granularity)
        gemm = call.plan.output
        return call.products.output(a, b, shape, *index, gemm=gemm, out_dtype=to), self

    def grad_input(self, g: Operand, shape: Shape, index: Any, call: "Call", to: dtype) -> Any:
        """Transpose the row data, and multiply by them; see `OnTheFly.grad_input`."""
        how, gemm = call.casts.weight_for_grad_input.how, call.plan.grad_input
        b = call.products.transposed(Operand(*self), how, g.scale)
        return call.products.grad_input(g, b, shape, *index, gemm=gemm, out_dtype=to)
