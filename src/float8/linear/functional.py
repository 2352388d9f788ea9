"""A linear layer in float8 as a function, and the autograd function of all layers, experts' too."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.autograd import computed_before, new_alias, once_differentiable
from float8.config import ConfigOrRecipe, as_config
from float8.formats import HIGH_PRECISION_DTYPES
from float8.gemm import grouped_matmul, grouped_outer, matmul, without_padding
from float8.kernels.runtime.ops import NO_ONNX
from float8.kernels.runtime.private import compiled_autograd_is_on, functorch_levels, surely
from float8.linear.plan import Casts, LinearPlan, plan_linear
from float8.linear.weight import TIMES_HELD, Weight
from float8.quantize import Cast, padded, quantize, recast, to_col
from float8.scales import Operand, Quantized
from float8.tensor import Float8Tensor, is_dtensor, local_tensor
from float8.tensor.ranks import SharedTokens, finished
from float8.tensor.wrapper import PLAIN

_NO_TRANSFORM = (
    " (grad, vmap, jvp, ...), expected one by itself: casts to float8 cannot be transformed; use "
    "backward() or torch.autograd.grad for one gradient at a time, or call "
    "convert_to_high_precision(model)"
)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: ConfigOrRecipe | None = None,
) -> Tensor:
    """Compute `input @ weight.T + bias` as `torch.nn.functional.linear`, with three float8 GEMMs.

    Args:
        input: [..., K] float32, bfloat16 or float16; converted to autocast's dtype under it.
        weight: [N, K], dtype of `input` unless under autocast; or a `Float8Tensor`.
        bias: [N] or None.
        config: a `Float8LinearConfig`, or the name of a recipe. None means dynamic tensorwise
            scaling. Delayed scaling has state, and so needs a `Float8Linear`.

    Returns:
        [..., N], dtype of the (autocast) input.

    Raises:
        TypeError: the dtype of `input` is not that of the weight, or no supported one; or one of
            them is a DTensor; or `config` is neither a configuration nor a name.
        ValueError: the last dim of `input` is not K, weight or bias has another shape, or `config`
            has delayed scaling.
        RuntimeError: the device has no float8 GEMM and `config.emulate` is False; or the call is
            within a transform of torch.func.
    """
    config = as_config(config)
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"linear: got a weight of shape {tuple(weight.shape)} and a bias of shape "
            f"{None if bias is None else tuple(bias.shape)}, expected [N, K] and [N]"
        )
    if config.delayed_sites:
        raise ValueError(
            "linear: got a config with delayed scaling, expected dynamic scaling: histories belong "
            "to a layer; use Float8Linear, or CastConfig(scaling_type=ScalingType.DYNAMIC)"
        )
    plan = plan_linear(config)
    return apply_linear(input, weight, bias, plan, plan.casts)


def apply_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    casts: Casts,
    held: Weight | None = None,
    enter: SharedTokens | None = None,
    leave: SharedTokens | None = None,
) -> Tensor:
    """Compute for `linear` and `Float8Linear` what they have in common; raises as `linear`.

    `input` may be a `Float8Tensor`, cast as planned. `casts` are those of the plan, with the state
    and the ranks of this call. `enter` and `leave`: as in `Call`.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and functorch_levels is not None and functorch_levels() is not None:
        raise RuntimeError(f"Float8Linear: got a call within torch.func{_NO_TRANSFORM}")
    if compiling and casts.grad_output.state is not None and compiled_autograd_is_on():
        # torch loses what a compiled forward hands to a backward that writes it, as amaxes are. At
        # this error it runs the layer in eager mode, where nothing is lost; not with fullgraph.
        raise RuntimeError(
            "Float8Linear: got a compiled forward with delayed scaling of grad_output within "
            "compiled autograd, expected one of the two: leave the forward in eager mode, or "
            "compile without compiled autograd, or scale grad_output dynamically"
        )
    plain = type(input) in PLAIN and type(weight) in PLAIN  # the usual case costs no call
    if not plain and is_dtensor(input, weight):
        which = "weight" if is_dtensor(weight) else "input and none as weight"
        raise TypeError(
            f"Float8Linear: got a DTensor as {which}, expected plain tensors, or a Float8Linear "
            f"whose weight and input both are DTensors; use Float8ColwiseParallel or "
            f"Float8RowwiseParallel, or .to_local() for parts that may have scales of their own"
        )
    grad, K = torch.is_grad_enabled(), weight.shape[1]
    input = in_compute_dtype(input, weight)
    if isinstance(input, Float8Tensor):
        if plan.output is None:
            input = input.to_original_precision()
        elif plan.output.powers_of_2 and not input._granularity.exponents:  # it may have any scale
            exact = [x and x._replace(powers_of_2=False) for x in (plan.output, plan.grad_weight)]
            plan = plan._replace(output=exact[0], grad_weight=exact[1])
    empty = input.numel() == 0
    if surely(empty) if compiling else empty:  # nothing to measure, nothing to multiply
        x = input.to_original_precision() if isinstance(input, Float8Tensor) else input
        y = weight.to_original_precision() if isinstance(weight, Float8Tensor) else weight
        output = x @ y.to(x.dtype).t()
    else:
        rows = input if input.dim() == 2 else input.reshape(-1, K)
        needs = grad and input.requires_grad, grad and weight.requires_grad
        if isinstance(weight, Float8Tensor):
            other = None if plan.reuse_weight else "grad_input"
            w = Weight(None, *operand_of("weight", weight, casts.weight, other))
        else:
            w = held or Weight(weight)
        call = Call(plan, casts, K, weight.dtype, *needs, enter=enter, leave=leave)
        args = rows, weight, w, None, call
        computed = computed_before(Linear, *args) if compiling else None
        output = Linear.apply(*args, computed)  # type: ignore[no-untyped-call]
    if input.dim() != 2:  # an op that changes nothing is still a node of the graph to issue
        shape = [*input.shape[:-1], output.shape[-1]]
        if enter is not None:
            shape[enter.dim] *= enter.ranks
        if leave is not None:
            shape[leave.dim] //= leave.ranks
        # No view: FSDP2 warns of modules that return views, and restricts writes into them.
        output = torch.ops.aten._unsafe_view.default(output, shape)
    return output if bias is None else output + bias.to(output.dtype)


def in_compute_dtype(input: Tensor, weight: Tensor) -> Tensor:
    """Return `input` in the dtype that autocast asks for, or as it is if it is float8 already.

    Raises what `linear` does for the dtypes, and the features, of both; they may be DTensors.
    """
    autocast = autocast_dtype(input.device)
    same = autocast is not None or input.dtype == weight.dtype
    if not same and not isinstance(local_tensor(input), Float8Tensor):
        raise TypeError(
            f"Float8Linear: got input of dtype {input.dtype} and weight of dtype "
            f"{weight.dtype}, expected the same; convert one of them or use torch.autocast"
        )
    for name, x in (("input", input), ("weight", weight)):
        if x.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(
                f"Float8Linear: got {name} of dtype {x.dtype}, expected one of "
                f"{', '.join(map(str, HIGH_PRECISION_DTYPES))}; convert it first"
            )
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"Float8Linear: got input of shape {tuple(input.shape)}, expected "
            f"[..., {weight.shape[1]}]"
        )
    if autocast is None or isinstance(local_tensor(input), Float8Tensor):
        return input
    return input.to(autocast)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which autocast has GEMMs compute on a device; None: it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # meta knows none
        return None
    return torch.get_autocast_dtype(device.type)


def operand_of(role: str, x: Float8Tensor, cast: Cast, other: str | None) -> Operand:
    """Return what a GEMM reads of `x`, which was cast elsewhere; its amax is recorded.

    `other`: the GEMM that needs another cast of `x`, so that this raises; None: there is none.
    """
    how = cast.how
    same = x._data.dtype == how.dtype and x._granularity is how.scaling_granularity
    if not same or x._is_transposed or other is not None:
        raise ValueError(
            f"Float8Linear: got {role} in {x._data.dtype} under {x._scaling}, expected one in high "
            f"precision: it is to be cast to {how.dtype} under {how.scaling_granularity}"
            f"{'' if other is None else f', and in another way for {other}'}; call "
            f"{role}.to_original_precision(), or configure its casts alike"
        )
    if cast.record and cast.state is not None and x._amax is not None:
        cast.state.record(x._amax)
    return Operand(x._data.contiguous(), x._scale)


# ---------------------------------------------------------------- the three GEMMs


class Call(NamedTuple):
    """A layer in one call: all that its autograd function takes, and keeps, besides tensors."""

    plan: LinearPlan
    casts: Casts
    in_features: int
    weight_dtype: torch.dtype
    need_grad_input: bool
    need_grad_weight: bool
    stored_transposed: bool = False
    """Whether the Parameter of held weights of experts lies as [E, K, N]."""
    enter: SharedTokens | None = None
    """Set if the input is sharded by tokens: gather it before the GEMM."""
    leave: SharedTokens | None = None
    """Set if the output is a partial sum: reduce-scatter it by tokens. Both need a cast whose
    columns follow exactly from its rows."""

    def by_weight(
        self,
        a: Operand,
        b: Operand,
        w: Weight,
        offs: Tensor | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        col: bool = False,
    ) -> Tensor:
        """Multiply `a` by `b`, row data of a weight, to [M, N]; `col`: column data, to [M, K].

        Compiled code calls an op that checks at run time whether the held data are current.
        """
        gemm = self.plan.grad_input if col else self.plan.output
        assert gemm is not None
        if w.col_data is not None and torch.compiler.is_compiling():
            first, second = gemm.granularities
            return TIMES_HELD(  # type: ignore[no-any-return]
                *a, *b, w.values.detach(), offs, self.stored_transposed, *shape, col,
                self.casts.weight.how.power_of_2, first.value, second.value, gemm.use_fast_accum,
                gemm.emulate, gemm.powers_of_2, dtype,
            )  # fmt: skip
        if offs is None:
            return matmul(a, b, shape, gemm=gemm, out_dtype=dtype)
        return grouped_matmul(a, b, offs, gemm=gemm, out_dtype=dtype)


class Linear(torch.autograd.Function):
    """`output = input @ weight.T` with each GEMM in float8 or high precision, as planned.

    output       [M, N] = input @ weight.T          row(input),         row(weight)
    grad_input   [M, K] = grad_output @ weight      row(grad_output),   col(weight)
    grad_weight  [N, K] = grad_output.T @ input     col(grad_output),   col(input)

    With `offs` each for the rows of a group, `offs[e - 1]:offs[e]`, by a weight of its own: the
    layers of experts, with weights [E, N, K].
    """

    @staticmethod
    def compute(
        input: Tensor, weight: Tensor, w: Weight, offs: Tensor | None, call: Call
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the output [M, N] of the input [M, K], in the compute dtype, and what is saved.

        Of the weight what `w` has. Of the input column data, made in the same read as row data; or,
        for backward to cast, `rows`: row data, or values in high precision, and forward's scale.
        """
        plan, casts, compiling = call.plan, call.casts, torch.compiler.is_compiling()
        dw_in_float8 = call.need_grad_weight and plan.grad_weight is not None
        row: Any = None
        M, col, ends, rows = input.shape[0], None, None, None
        if plan.output is None:
            y = input @ weight.to(input.dtype).t()
        else:
            if isinstance(input, Float8Tensor):
                other = None if plan.input_rows_suffice else "grad_weight"
                row = operand_of("input", input, casts.input, other)
                row = padded(row, casts.input.how.scaling_granularity, pad_rows=False)
            elif call.enter is not None:
                row, M = call.enter.gathered(input, casts.input, traced=True), M * call.enter.ranks
            else:
                # A compiler chooses what to keep: see `recast`.
                now = dw_in_float8 and plan.reuse_input and (offs is not None or not compiling)
                x = quantize(input, casts.input, row=True, col=now, traced=True, offs=offs)
                row, col, ends = x.row, x.col, x.ends
            b = w.row(casts.weight)
            shape = M, weight.shape[-2]  # read here: torch.jit.trace follows sizes
            y = call.by_weight(row, b, w, offs, shape, input.dtype)
            if w.values is not None:  # backward reads held columns, or casts: no row data
                one_scale = plan.reuse_weight and casts.weight.how.scaling_granularity.one_scale
                again = one_scale and w.col_data is None
                # Not by `_replace`, which takes four times as long.
                scale_of_row = None
                if again:  # that of each expert is there for each row
                    scale_of_row = b.scale if offs is None else b.scale[:, 0].contiguous()
                w = Weight(w.values, None, scale_of_row, *w[3:])
            del b
        if dw_in_float8 and not plan.reuse_input:
            x = quantize(input, casts.input_for_grad_weight, col=True, offs=offs)
            col, ends = x.col, x.ends
        if col is None and call.need_grad_weight:
            if isinstance(input, Float8Tensor):
                rows = input._data
            elif call.enter is not None:
                rows = row.data  # those of all ranks
            else:
                # Compiled code does not notice if somebody writes into what it keeps. Where nobody
                # does, the compiler drops the copy.
                rows = input.clone() if compiling else input
        rows_scale = None if rows is None or row is None else row.scale
        col_data, col_scale = col or (None, None)
        if not call.need_grad_input:
            w = Weight()
        if call.leave is not None:
            y = finished(call.leave.start_reduce_scatter(y))
        return y, (rows, rows_scale, col_data, col_scale, ends, offs, *w)

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, w: Weight, offs: Any, call: Call, computed: Any
    ) -> Tensor:
        """Return the output; `computed` if a compiler has traced that by now."""
        if computed is None:
            y, saved = Linear.compute(input, weight, w, offs, call)
        else:
            y, saved = computed
            y = new_alias(y)
        ctx.save_for_backward(*saved)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return `grad_input`, dtype of grad_output, and `grad_weight`, dtype of the weight."""
        compiling = torch.compiler.is_compiling()
        if not compiling and functorch_levels is not None and functorch_levels() is not None:
            raise RuntimeError(f"Float8Linear: got a backward within torch.func{_NO_TRANSFORM}")
        call: Call = ctx.call
        plan, casts = call.plan, call.casts
        rows, rows_scale, col_data, col_scale, ends, offs, *saved_w = ctx.saved_tensors
        w, dtype = Weight(*saved_w), grad_output.dtype
        dx_in_float8 = call.need_grad_input and plan.grad_input is not None
        dw_in_float8 = call.need_grad_weight and plan.grad_weight is not None
        reuse = dw_in_float8 and plan.reuse_grad_output
        (M, N), g = grad_output.shape, Quantized()
        if offs is not None:
            grad_output = grad_output.contiguous()
        if call.leave is not None:  # grad_output has the tokens of this rank, as the output had
            row, M = call.leave.gathered(grad_output, casts.grad_output), M * call.leave.ranks
            g = Quantized(row, to_col(row, casts.grad_output.how) if reuse else None)
        elif dx_in_float8 or reuse:
            g = quantize(grad_output, casts.grad_output, row=dx_in_float8, col=reuse, offs=offs)

        dx = dw = None
        if dx_in_float8:
            b = w.col(casts.weight_for_grad_input, g.row.scale)
            dx = call.by_weight(g.row, b, w, offs, (M, call.in_features), dtype, col=True)
            del b  # of experts as large as half of grad_weight
        elif call.need_grad_input:
            dx = grad_output @ w.values.to(dtype)
        if dx is not None and call.enter is not None:
            dx = call.enter.start_reduce_scatter(dx)  # overlaps grad_weight; finished below
        if dw_in_float8:
            if not reuse:
                g = quantize(grad_output, casts.grad_output_for_grad_weight, col=True, offs=offs)
            x = Operand(col_data, col_scale)
            if col_data is None:
                x = recast(rows, casts.input.how, rows_scale)
            gemm: Any = plan.grad_weight
            K, to = call.in_features, call.weight_dtype
            if offs is None:
                dw = matmul(g.col, x, (N, K), gemm=gemm, out_dtype=to)
            else:
                dw = grouped_matmul(g.col, x, ends, gemm=gemm, out_dtype=to, tokens=M)
                dw = dw if dw.shape[1:] == (N, K) else without_padding(dw, N, K)
        elif call.need_grad_weight:
            dw = grad_output.t() @ rows if offs is None else grouped_outer(grad_output, rows, offs)
            dw = dw.to(call.weight_dtype)
        if dx is not None and call.enter is not None:
            dx = finished(dx)
        return dx, dw, None, None, None, None

    @staticmethod
    def symbolic(*_: Any) -> Any:
        """Refuse `torch.onnx.export` of what TorchScript traced, which calls this."""
        raise RuntimeError(NO_ONNX)
