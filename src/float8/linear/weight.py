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

Fields = tuple[Any, ...]


class Weight(Protocol):
    """Protocol of classes that multiply by a weight, [N, K] or for experts [E, N, K], in two GEMMs.

    They are NamedTuples of tensors or None. Forward calls `output`, and saves the fields that it
    returns by `save_for_backward`: tensors on `ctx` would live as long as the loss. Backward makes
    an instance of them, and calls `grad_input` if that GEMM is in float8. `settings` has casts and
    GEMMs; `group_ends` is (), or for experts one tensor: the ends of the rows of each.
    """

    def output(
        self, a: Operand, shape: Shape, group_ends: Any, settings: "Call", out_dtype: dtype
    ) -> tuple[Tensor, Fields]:
        """Return `a @ weight.T` of `shape` (M, N), and the fields of an instance for backward."""

    def grad_input(
        self, g: Operand, shape: Shape, group_ends: Any, settings: "Call", out_dtype: dtype
    ) -> Tensor:
        """Return `g @ weight` of `shape` (M, K); `g` is grad_output in float8."""


class OnTheFly(NamedTuple):
    """A weight in high precision that is quantized in forward and again in backward."""

    values: Tensor | Any = None
    scale: Tensor | None = None
    """In backward, the scale of forward if backward quantizes under the same one; else None."""

    def output(
        self, a: Operand, shape: Shape, group_ends: Any, settings: "Call", out_dtype: dtype
    ) -> tuple[Tensor, Fields]:
        """Quantize the weight; return `a @ weight.T`, and (weight, scale for backward or None)."""
        cast, plan, products = settings.casts.weight, settings.plan, settings.products
        traced = cast.source is not None  # record the amax outside the cast; see `quantize`
        b = products.quantize_weight(self.values, cast, row=True, pad_rows=True, traced=traced).row
        y = products.output(a, b, shape, *group_ends, gemm=plan.output, out_dtype=out_dtype)
        scale = None
        if plan.reuse_weight and cast.config.scaling_granularity.one_scale:
            scale = b.scale[:, 0].contiguous() if products.repeats_scales else b.scale  # [E] or []
        return y, (self.values, scale)

    def grad_input(
        self, g: Operand, shape: Shape, group_ends: Any, settings: "Call", out_dtype: dtype
    ) -> Any:
        """Quantize the weight to column data (the transposed copy), and return `g @ weight`.

        The cast, unless a delayed one, waits for `g.scale`: a compiler must not move it into
        forward, where column data (of all weights under FSDP2) would take memory until backward.
        """
        cast, products = settings.casts.weight_for_grad_input, settings.products
        gemm = settings.plan.grad_input
        if self.scale is not None:
            cast = Cast(cast.config, scale=self.scale)
        b = products.quantize_weight(self.values, cast, col=True, after=g.scale).col
        return products.grad_input(g, b, shape, *group_ends, gemm=gemm, out_dtype=out_dtype)


class InFloat8(NamedTuple):
    """A weight in float8, unpadded: a Parameter, or data that FSDP2 frees and gathers again."""

    data: Tensor | Any = None
    scale: Tensor | Any = None

    def output(
        self, a: Operand, shape: Shape, group_ends: Any, settings: "Call", out_dtype: dtype
    ) -> tuple[Tensor, Fields]:
        """Return `a @ weight.T`, of data padded as GEMMs need, and the unpadded (data, scale)."""
        products, gemm = settings.products, settings.plan.output
        b = products.padded(Operand(*self), settings.casts.weight.config.scaling_granularity)
        return products.output(a, b, shape, *group_ends, gemm=gemm, out_dtype=out_dtype), self

    def grad_input(
        self, g: Operand, shape: Shape, group_ends: Any, settings: "Call", out_dtype: dtype
    ) -> Any:
        """Convert the data to column data (the transposed copy), and return `g @ weight`."""
        products, gemm = settings.products, settings.plan.grad_input
        cast_config = settings.casts.weight_for_grad_input.config
        b = products.transposed(Operand(*self), cast_config, g.scale)
        return products.grad_input(g, b, shape, *group_ends, gemm=gemm, out_dtype=out_dtype)
