"""The linear layers of experts as one function: the rows of each expert by a weight of its own.

output       [T, N]    = input @ weight[e].T            row(input),         row(weight)
grad_input   [T, K]    = grad_output @ weight[e]        row(grad_output),   col(weight)
grad_weight  [E, N, K] = grad_output.T @ input          col(grad_output),   col(input)

Each for the rows of group e. It is `float8.linear` with groups: the same plan, the same casts, and
of each the scales are those of one group.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.autograd import computed_before, once_differentiable, own
from float8.config import ConfigOrRecipe, Float8LinearConfig, Float8Weights, as_config
from float8.experts.gather import GatheredExperts
from float8.experts.weight import cast_weights, column_data, product_with_held, row_data
from float8.formats import GEMM_ALIGNMENT, HIGH_PRECISION_DTYPES
from float8.gemm import Gemm, grouped_matmul, grouped_outer
from float8.kernels.cast_groups import GroupsInFloat8, cast_groups
from float8.linear.call import KeptWeight
from float8.linear.functional import autocast_dtype
from float8.linear.plan import LinearPlan, plan_linear
from float8.quantize import Cast
from float8.scales import Operand
from float8.tensor.held_weights import HeldWeight


def grouped_linear(
    input: Tensor, weight: Tensor, offs: Tensor, *, config: ConfigOrRecipe | None = None
) -> Tensor:
    """Multiply each group of rows by the weight of its expert, with three grouped float8 GEMMs.

    For each expert e `input[offs[e - 1]:offs[e]] @ weight[e].T`, as `F.grouped_mm(input,
    weight.transpose(-2, -1), offs=offs)` does in high precision. The sizes of groups are read on
    the device: nothing waits for them, and compiled code holds for any.

    Args:
        input: [T, K] float32, bfloat16 or float16, the rows of each expert together; cast to
            autocast's dtype under autocast. Rows from `offs[-1]` on belong to nobody.
        weight: [E, N, K], one [N, K] for each expert, of the dtype of `input` unless under
            autocast. N and K are multiples of 16, unless the config says `emulate`. Weights that
            lie as [E, K, N] are given as `weight.transpose(1, 2)`, which is not copied.
        offs: [E] int32, ascending, on the same device: the row behind the last one of each expert.
            Groups may have any size, and be empty. On a CPU offs that descend, are negative or
            exceed T raise. On a GPU they are not checked: each is clamped to 0..T and raised to the
            largest before it.
        config: a `Float8LinearConfig`, or the name of a recipe; None means `"rowwise"`, which
            grouped GEMMs are made for. Under `"tensorwise"` a scale covers what one expert has of a
            tensor. All casts are to e4m3, those of gradients, too: grouped GEMMs take nothing else.
            `use_fast_accum` of the GEMM of the output is that of all three.

    Returns:
        [T, N], dtype of the (autocast) input; zeros from row `offs[-1]` on, as in the gradient.

    Raises:
        TypeError: a dtype is not one of those named above, or `config` is neither a configuration
            nor a name.
        ValueError: a shape is not one of those; on a CPU, offs descend, are negative or exceed T,
            also in compiled code; or the config has delayed scaling, block scales, weights that are
            held or in float8 only, or the GEMM of `output` or `grad_input` in high precision.
        RuntimeError: the device has no such GEMM and `config.emulate` is False.
    """
    config = as_config("rowwise" if config is None else config, keep=False)
    reason = no_grouped_gemm(config)
    if reason is None and config.float8_weights is Float8Weights.HELD:
        reason = "float8_weights=HELD, which belongs to a module that is converted"
    if reason is not None:
        raise ValueError(f"grouped_linear: got a config with {reason}, expected {EXPECTED}")
    return apply_grouped(input, weight, offs, plan_linear(config, grouped=True), config.emulate)


EXPECTED = "the recipe 'tensorwise', 'rowwise' or 'rowwise_with_gw_hp', or casts like theirs"


def no_grouped_gemm(config: Float8LinearConfig) -> str | None:
    """Name what a configuration asks for and no grouped GEMM does, or return None."""
    if config.delayed_sites:
        return "delayed scaling, whose histories are of one tensor"
    if config.scales_by_blocks:
        return "block scales, for which there is no grouped GEMM"
    if not (config.runs_in_float8("output") and config.runs_in_float8("grad_input")):
        return "the GEMM of output or grad_input in high precision"
    if config.float8_weights is Float8Weights.ONLY:
        return "float8_weights=ONLY"
    return None


def apply_grouped(
    input: Tensor,
    weight: Tensor,
    offs: Tensor,
    plan: LinearPlan,
    any_dims: bool,
    held: HeldWeight | None = None,
) -> Tensor:
    """Compute for `grouped_linear` and for modules what they have in common.

    `any_dims`: N and K need not be multiples of 16. `held`: the weight in float8, if it is held.
    """
    autocast = autocast_dtype(input.device)
    if autocast is not None:
        input = input.to(autocast)
    _require(input, weight, offs, same_dtype=autocast is None, any_dims=any_dims)
    # Nothing to measure, nothing to multiply. Compiled code may not know how many rows there will
    # be, as under expert parallel: there the ops find none, as on a CPU, where they check offs.
    if not torch.compiler.is_compiling() and input.shape[0] == 0 and not input.is_cpu:
        return input @ weight[0].to(input.dtype).t()
    grad = torch.is_grad_enabled()
    needs = grad and input.requires_grad, grad and weight.requires_grad
    turned = held is not None and weight.stride() != held.weight.stride()
    _, N, K = weight.shape
    call = GroupedCall(plan, weight.dtype, N, K, turned, *needs)
    args = input.contiguous(), weight, offs, call, held
    computed = computed_before(_GroupedLinear, *args) if torch.compiler.is_compiling() else None
    return _GroupedLinear.apply(*args, computed)  # type: ignore[no-any-return, no-untyped-call]


class GroupedCall(NamedTuple):
    """The layer of some experts in one call: what its autograd function takes besides tensors."""

    plan: LinearPlan
    weight_dtype: torch.dtype
    out_features: int
    in_features: int
    turned: bool
    """Whether the Parameter of held weights lies as [E, K, N]."""
    need_grad_input: bool
    need_grad_weight: bool

    def output(
        self,
        x: Operand,
        kept: KeptWeight,
        held: HeldWeight | None,
        offs: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Multiply row data [T, K] by the weights: `x @ weight[e].T` [T, N]."""
        gemm, cast = self.plan.output, self.plan.casts.weight
        rows = None if held is None else held.operand.row
        return self._by_weights(x, kept, rows, offs, cast, gemm, dtype, columns=False)

    def grad_input(self, g: Operand, kept: KeptWeight, offs: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply row data [T, N] by the weights: `g @ weight[e]` [T, K]."""
        gemm, cast = self.plan.grad_input, self.plan.casts.weight_for_grad_input
        held = None if kept.col_data is None else Operand(kept.col_data, kept.col_scale)
        return self._by_weights(g, kept, held, offs, cast, gemm, dtype, columns=True)

    def _by_weights(
        self,
        a: Operand,
        kept: KeptWeight,
        held: Operand | None,
        offs: Tensor,
        cast: Cast,
        gemm: Gemm | None,
        dtype: torch.dtype,
        *,
        columns: bool,
    ) -> Tensor:
        """Multiply groups of rows by the weights or their columns: held, gathered or cast here."""
        assert gemm is not None
        if held is not None and torch.compiler.is_compiling():
            return product_with_held(
                a, kept.data, held, self.turned, offs, cast, columns, gemm, dtype
            )
        if held is not None:
            w = held
        elif kept.scale is None:
            made = cast_weights(kept.data, cast, row=not columns, col=columns)
            w = made.col if columns else made.row
        elif columns:
            w = column_data(Operand(kept.data, kept.scale), cast, a.scale)
        else:
            w = row_data(Operand(kept.data, kept.scale))
        return grouped_matmul(a, w, offs, gemm=gemm, out_dtype=dtype)

    def grad_weight(self, g: Operand, x: Operand, ends: Tensor, tokens: int) -> Tensor:
        """Multiply column data [N, T] by column data [K, T]: `g.T @ x` [E, N, K]."""
        gemm, N, K = self.plan.grad_weight, self.out_features, self.in_features
        assert gemm is not None
        dtype = self.weight_dtype
        return grouped_matmul(g, x, ends, gemm=gemm, out_dtype=dtype, tokens=tokens)[:, :N, :K]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def compute(
        input: Tensor, weight: Tensor, offs: Tensor, call: GroupedCall, held: HeldWeight | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the output, and what backward reads."""
        plan = call.plan
        in_float8 = call.need_grad_weight and plan.grad_weight is not None
        shared = in_float8 and plan.share_input
        x = _cast(input, offs, plan.casts.input, row=True, col=shared)
        kept = KeptWeight(weight)
        if isinstance(weight, GatheredExperts):
            kept = KeptWeight(weight._data, weight._scale)
        elif held is not None:
            kept = KeptWeight(held.weight, None, *held.operand.col)
        y = call.output(x.row, kept, held, offs, input.dtype)
        if not call.need_grad_input:
            kept = KeptWeight()
        of_input: tuple[Tensor | None, ...] = (None, None, None)
        if in_float8:
            if not shared:
                x = _cast(input, offs, plan.casts.input_for_grad_weight, row=False, col=True)
            of_input = *x.col, x.ends
        elif call.need_grad_weight:
            # Compiled code does not notice if somebody writes into what it keeps.
            of_input = input.clone() if torch.compiler.is_compiling() else input, None, None
        return y, (*of_input, *kept, offs)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        offs: Tensor,
        call: GroupedCall,
        held: HeldWeight | None,
        computed: Any,
    ) -> Tensor:
        """Return the output; `computed` if a compiler has traced that by now."""
        if computed is None:
            y, saved = _GroupedLinear.compute(input, weight, offs, call, held)
        else:
            y, saved = own(computed[0]), computed[1]
        ctx.save_for_backward(*saved)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return `grad_input` [T, K], dtype of grad_output; `grad_weight` [E, N, K], as weights."""
        call: GroupedCall = ctx.call
        saved_input, input_scale, ends, *of_weight, offs = ctx.saved_tensors
        kept = KeptWeight(*of_weight)
        plan, dtype, grad_output = call.plan, grad_output.dtype, grad_output.contiguous()
        row, col = call.need_grad_input, call.need_grad_weight and plan.grad_weight is not None
        shared_col = col and plan.share_grad_output
        g = GroupsInFloat8()
        if row or shared_col:
            g = _cast(grad_output, offs, plan.casts.grad_output, row=row, col=shared_col)
        dx = call.grad_input(g.row, kept, offs, dtype) if row else None
        dw = None
        if col:
            if not shared_col:
                other = plan.casts.grad_output_for_grad_weight
                g = _cast(grad_output, offs, other, row=False, col=True)
            x, tokens = Operand(saved_input, input_scale), grad_output.shape[0]
            dw = call.grad_weight(g.col, x, ends, tokens)
        elif call.need_grad_weight:
            dw = grouped_outer(grad_output, saved_input, offs).to(call.weight_dtype)
        return dx, dw, None, None, None, None


def _cast(x: Tensor, offs: Tensor, cast: Cast, *, row: bool, col: bool) -> GroupsInFloat8:
    return cast_groups(x, offs, cast.how, row=row, col=col)


def _require(
    input: Tensor, weight: Tensor, offs: Tensor, *, same_dtype: bool, any_dims: bool
) -> None:
    """Raise what `grouped_linear` does for its tensors."""
    for name, x in (("input", input), ("weight", weight)):
        if hasattr(x, "device_mesh"):
            raise TypeError(
                f"grouped_linear: got a DTensor as {name}, expected plain tensors; call .to_local()"
            )
        if x.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(
                f"grouped_linear: got {name} of dtype {x.dtype}, expected one of "
                f"{', '.join(map(str, HIGH_PRECISION_DTYPES))}; cast it first"
            )
    if same_dtype and input.dtype != weight.dtype:
        raise TypeError(
            f"grouped_linear: got input of dtype {input.dtype} and weight of dtype {weight.dtype}, "
            f"expected the same; cast one of them or use torch.autocast"
        )
    if offs.dtype != torch.int32:
        raise TypeError(
            f"grouped_linear: got offs of dtype {offs.dtype}, expected torch.int32; call "
            f"offs.to(torch.int32)"
        )
    shapes = tuple(map(tuple, (input.shape, weight.shape, offs.shape)))
    fits = input.dim() == 2 and weight.dim() == 3 and 0 not in weight.shape
    if not fits or input.shape[1] != weight.shape[2] or offs.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_linear: got input, weight and offs of shapes {shapes}, expected [T, K], "
            f"[E, N, K] and [E], none of E, N and K being 0; weights that lie as [E, K, N] are to "
            f"be given as weight.transpose(1, 2)"
        )
    if len({input.device, weight.device, offs.device}) > 1:
        raise ValueError(
            f"grouped_linear: got input, weight and offs on {input.device}, {weight.device} and "
            f"{offs.device}, expected one device"
        )
    if not any_dims and any(dim % GEMM_ALIGNMENT for dim in weight.shape[1:]):
        raise ValueError(
            f"grouped_linear: got weight of shape {tuple(weight.shape)}, expected N and K that are "
            f"multiples of {GEMM_ALIGNMENT}; leave these experts in high precision, or set "
            f"emulate=True"
        )
