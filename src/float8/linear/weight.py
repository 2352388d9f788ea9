"""Classes that multiply by the weight of a layer, one class for each way to store the weight.

`Linear` calls the methods `output` and `grad_input` of a `Weight`. `OnTheFly` casts the weight in
both methods. `InFloat8` has the data and scale of a `Float8Tensor`: a weight that FSDP2 gathered,
or a Parameter in float8. `float8.weights.held` adds weights that are cast once per optimizer step.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, dtype

from float8.products import Shape
from float8.quantize import Cast
from float8.scales import Operand

if TYPE_CHECKING:
    from float8.linear.functional import Call


class Weight(Protocol):
    """Protocol of classes that multiply by a weight, [N, K] or for experts [E, N, K], in two GEMMs.

    They are NamedTuples of tensors or None. Forward calls `output`, and passes the fields that it
    returns to `save_for_backward`, since a tensor on `ctx` would live as long as the loss. Backward
    makes an instance of these fields, and calls `grad_input`. `shape` is that of the result without
    padding. `index` is (), or for experts one tensor: the ends of the groups of rows.
    """

    def output(
        self, a: Operand, shape: Shape, index: Any, call: "Call", out_dtype: dtype
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Return `a @ weight.T` in `out_dtype`, for float8 `a` [M, K]; and fields for backward."""

    def grad_input(
        self, g: Operand, shape: Shape, index: Any, call: "Call", out_dtype: dtype
    ) -> Tensor:
        """Return `g @ weight` [M, K] in `out_dtype`; `g` [M, N] is grad_output in float8."""


class OnTheFly(NamedTuple):
    """A weight in high precision that is quantized in forward and again in backward."""

    values: Tensor | Any = None
    scale: Tensor | None = None
    """The scale of forward if backward quantizes under the same scale, else None."""

    def output(
        self, a: Operand, shape: Shape, index: Any, call: "Call", out_dtype: dtype
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Quantize the weight; return `a @ weight.T` [M, N], and the fields for backward."""
        cast, gemm, products = call.casts.weight, call.plan.output, call.products
        traced = cast.source is not None  # record the amax outside the cast; see `quantize`
        b = products.quantize_weight(self.values, cast, row=True, pad_rows=True, traced=traced).row
        y = products.output(a, b, shape, *index, gemm=gemm, out_dtype=out_dtype)
        scale = None
        if call.plan.reuse_weight and cast.config.scaling_granularity.one_scale:
            scale = b.scale[:, 0].contiguous() if products.repeats_scales else b.scale  # [E] or []
        return y, (self.values, scale)

    def grad_input(self, g: Operand, shape: Shape, index: Any, call: "Call", out_dtype: Any) -> Any:
        """Quantize the weight to column data (the transposed copy), and return `g @ weight` [M, K].

        The cast depends on `g.scale`, so that a compiler cannot move the cast into forward, where
        column data (under FSDP2: of all gathered weights) would take memory until backward.
        """
        cast, gemm, products = call.casts.weight_for_grad_input, call.plan.grad_input, call.products
        if self.scale is not None:
            cast = Cast(cast.config, scale=self.scale)
        b = products.quantize_weight(self.values, cast, col=True, after=g.scale).col
        return products.grad_input(g, b, shape, *index, gemm=gemm, out_dtype=out_dtype)


class InFloat8(NamedTuple):
    """A weight in float8, unpadded: a Parameter, or data that FSDP2 frees and gathers again."""

    data: Tensor | Any = None
    scale: Tensor | Any = None

    def output(
        self, a: Operand, shape: Shape, index: Any, call: "Call", out_dtype: dtype
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Return `a @ weight.T` [M, N], from data padded as GEMMs need, and fields for backward."""
        b = call.products.padded(Operand(*self), call.casts.weight.config.scaling_granularity)
        gemm = call.plan.output
        return call.products.output(a, b, shape, *index, gemm=gemm, out_dtype=out_dtype), self

    def grad_input(self, g: Operand, shape: Shape, index: Any, call: "Call", out_dtype: Any) -> Any:
        """Return `g @ weight` [M, K], from column data (the transposed copy) of the weight."""
        cast_config, gemm = call.casts.weight_for_grad_input.config, call.plan.grad_input
        b = call.products.transposed(Operand(*self), cast_config, g.scale)
        return call.products.grad_input(g, b, shape, *index, gemm=gemm, out_dtype=out_dtype)
