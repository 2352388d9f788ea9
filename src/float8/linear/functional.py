"""A linear layer in float8 as a function: three GEMMs, their casts, and what backward keeps.

    output       [M, N] = input @ weight.T          row(input),         row(weight)
    grad_input   [M, K] = grad_output @ weight      row(grad_output),   col(weight)
    grad_weight  [N, K] = grad_output.T @ input     col(grad_output),   col(input)

What is saved for backward is float8: the transposed copy of the input, made in the same read as
its row data; or the input itself where somebody else keeps it, and under a compiler, which chooses
what to keep. Of the weight only what exists anyway is kept, see `float8.linear.weight`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.autograd import computed_before, once_differentiable, own
from float8.config import ConfigOrRecipe, ScalingGranularity, config_meant_by
from float8.formats import HIGH_PRECISION_DTYPES, sendable
from float8.gemm import Gemm, matmul
from float8.kernels.runtime.ops import NO_ONNX
from float8.kernels.runtime.private import functorch_levels, is_batch_of_gradients
from float8.linear.across import HERE, Across, Reduction, Tokens
from float8.linear.held import HeldPart, product_with_held
from float8.linear.plan import LinearPlan, plan_linear
from float8.linear.weight import (
    KeptWeight,
    kept_weight,
    record_amax,
    weight_columns,
    weight_rows,
)
from float8.quantize.history import DelayedScale
from float8.quantize.quantize import columns, padded, quantize, recast
from float8.quantize.spec import CastSpec, Part, Quantized
from float8.tensor import Float8Tensor, local_tensor


class DelayedScales(NamedTuple):
    """The delayed-scaling state of each cast site that owns one."""

    input: DelayedScale | None = None
    weight: DelayedScale | None = None
    grad_output: DelayedScale | None = None
    input_for_grad_weight: DelayedScale | None = None
    weight_for_grad_input: DelayedScale | None = None
    grad_output_for_grad_weight: DelayedScale | None = None


NO_SCALES = DelayedScales()

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
    """`torch.nn.functional.linear` with its three GEMMs in float8: `input @ weight.T + bias`.

    Args:
        input: [..., K] float32, bfloat16 or float16; cast to autocast's dtype under autocast.
        weight: [N, K], dtype of `input` unless under autocast; or a `Float8Tensor`.
        bias: [N] or None.
        config: a `Float8LinearConfig`, or the name of a recipe. None means dynamic tensorwise
            scaling. Delayed scaling has state, and so needs a `Float8Linear`.

    Returns:
        [..., N], dtype of the (autocast) input.

    Raises:
        TypeError: the dtype of `input` is not that of the weight, or no supported one; or one of
            them is a DTensor; or `config` is neither a configuration nor a name.
        ValueError: the last dim of `input` is not K, or needs padding that `pad_inner_dim=False`
            forbids; weight or bias has another shape; or `config` has delayed scaling.
        RuntimeError: the device has no float8 GEMM and `config.emulate` is False; or the call is
            within a transform of torch.func.
    """
    config = config_meant_by(config)
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
    if not plan.pad:
        require_aligned(f"weight of shape {tuple(weight.shape)}", weight.shape, plan.alignment)
    return apply_linear(input, weight, bias, plan)


def apply_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    scales: DelayedScales = NO_SCALES,
    ready: Quantized | None = None,
    keep_input: bool = False,
    across: Across = HERE,
) -> Tensor:
    """What `linear` and `Float8Linear` have in common.

    Args:
        input: as for `linear`; or a `Float8Tensor`, cast as planned.
        weight: as for `linear`.
        bias: as for `linear`.
        plan: which casts and GEMMs run how.
        scales: delayed-scaling state.
        ready: the weight in float8, where it is that already; a `Float8Tensor` need not be told.
        keep_input: save `input` itself for backward, and cast it again there: for one that somebody
            keeps anyway. Without effect on an input that must be copied first.
        across: the ranks that hold parts of these tensors, and so share their amaxes.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and functorch_levels is not None and functorch_levels() is not None:
        raise RuntimeError(f"Float8Linear: got a call within torch.func{_NO_TRANSFORM}")
    grad = torch.is_grad_enabled()
    source, input = input, check_input(input, weight)
    # A copy made for this layer alone is nobody else's.
    keep_input = keep_input and input is source and input.is_contiguous()
    K = weight.shape[1]
    rows = input if input.dim() == 2 else input.reshape(-1, K)
    if input.numel() == 0:  # no rows: nothing to measure, nothing to multiply
        output = rows @ weight.to(input.dtype).t()
    else:
        need_grad_weight = grad and weight.requires_grad
        if not plan.pad and need_grad_weight and plan.grad_weight is not None:
            tokens = rows.shape[0]
            what = f"{tokens} tokens (all leading dims) for grad_weight"
            require_aligned(what, (tokens,), plan.alignment)
        if ready is None and isinstance(weight, Float8Tensor):
            ready = weight_in_float8(weight, plan)
        keep_input = keep_input or compiling or isinstance(input, Float8Tensor)
        call = Call(
            plan,
            scales,
            across,
            record=grad,
            need_grad_input=grad and input.requires_grad,
            need_grad_weight=need_grad_weight,
            keep_input=plan.share_input and keep_input,
        )
        made = computed_before(_Linear, rows, weight, ready, call) if compiling else None
        output = _Linear.apply(rows, weight, ready, call, made)  # type: ignore[no-untyped-call]
    if input.dim() != 2:  # an op that changes nothing is still a node of the graph to issue
        output = with_leading_dims(output, input, across.output)
    return output if bias is None else output + bias.to(output.dtype)


def check_input(input: Tensor, weight: Tensor) -> Tensor:
    """`input` in the compute dtype, which autocast may choose; raises as `linear` does."""
    if hasattr(input, "device_mesh") or hasattr(weight, "device_mesh"):
        which = "weight" if hasattr(weight, "device_mesh") else "input and none as weight"
        raise TypeError(
            f"Float8Linear: got a DTensor as {which}, expected plain tensors, or a Float8Linear "
            f"whose weight and input both are DTensors; use Float8ColwiseParallel or "
            f"Float8RowwiseParallel, or .to_local() for parts that may have scales of their own"
        )
    dtype = require_input(input, weight)
    return input if dtype is None or isinstance(input, Float8Tensor) else input.to(dtype)


def require_input(input: Tensor, weight: Tensor) -> torch.dtype | None:
    """Raise what `linear` does for the dtypes, and the features, of both; they may be DTensors.

    Returns the dtype that autocast asks for: see `autocast_dtype`.
    """
    autocast = autocast_dtype(input.device)
    # What is float8 was cast from the compute dtype.
    same = autocast is not None or input.dtype == weight.dtype
    if not same and not isinstance(local_tensor(input), Float8Tensor):
        raise TypeError(
            f"Float8Linear: got input of dtype {input.dtype} and weight of dtype "
            f"{weight.dtype}, expected the same; cast one of them or use torch.autocast"
        )
    for name, x in (("input", input), ("weight", weight)):
        if x.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(
                f"Float8Linear: got {name} of dtype {x.dtype}, expected one of "
                f"{', '.join(map(str, HIGH_PRECISION_DTYPES))}; cast it first"
            )
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"Float8Linear: got input of shape {tuple(input.shape)}, expected "
            f"[..., {weight.shape[1]}]"
        )
    return autocast


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast has GEMMs compute on a device; None: it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # meta knows none
        return None
    return torch.get_autocast_dtype(device.type)


def require_aligned(what: str, dims: Iterable[int], alignment: int) -> None:
    """Raise a `ValueError` for dims that need padding, where `pad_inner_dim=False` forbids it."""
    if any(dim % alignment for dim in dims):
        raise ValueError(
            f"Float8Linear: got {what}, expected a multiple of {alignment} in each dim; set "
            f"pad_inner_dim=True to have them padded"
        )


def with_leading_dims(rows: Tensor, like: Tensor, tokens: Tokens | None = None) -> Tensor:
    """[M, N] with the leading dims of `like` [..., K]; no view, since nobody else holds `rows`.

    Of `tokens` that ranks share there are fewer.

    FSDP2 warns of modules that return views, and writing into them in place is restricted.
    """
    shape = [*like.shape[:-1], rows.shape[1]]
    if tokens is not None:
        shape[tokens.dim] //= tokens.ranks
    return torch.ops.aten._unsafe_view.default(rows, shape)  # type: ignore[no-any-return]


def weight_in_float8(weight: Float8Tensor, plan: LinearPlan) -> Quantized:
    """The operand of a weight that is float8; no bytes are copied."""
    return _operand_of("weight", weight, plan.weight, None if plan.share_weight else "grad_input")


def input_in_float8(input: Float8Tensor, plan: LinearPlan) -> Quantized:
    """The operand of an input that was cast for several layers at once."""
    operand = _operand_of(
        "input", input, plan.input, None if plan.casts_input_once() else "grad_weight"
    )
    return operand._replace(row=padded(operand.row, plan.input, pad_rows=False))


def _operand_of(role: str, x: Float8Tensor, spec: CastSpec, other: str | None) -> Quantized:
    """The operand of `x`; `other`: a GEMM for which it is to be cast in another way."""
    got = f"{x._data.dtype} under {x._scaling}"
    expected = f"{spec.dtype} under {spec.granularity}"
    if got != expected or other is not None:
        raise ValueError(
            f"Float8Linear: got {role} in {got}, expected one in high precision: it is to be "
            f"cast to {expected}{'' if other is None else f', and in another way for {other}'}; "
            f"call {role}.to_original_precision(), or configure its casts alike"
        )
    return Quantized(Part(x._data.contiguous(), x._scale), amax=x._amax)


def cast_tokens(
    x: Tensor,
    spec: CastSpec,
    tokens: Tokens | None,
    *,
    row: bool,
    col: bool,
    state: DelayedScale | None,
    record: bool,
    reduce: Reduction | None,
) -> Quantized:
    """Cast `x` [R, C]; or, of `tokens` that ranks share, [R / ranks, C] here, and gather bytes.

    Under one scale for all ranks, or under one for each row, which travel, too: see
    `LinearPlan.casts_grad_output_once`.
    """
    if tokens is None:
        return quantize(x, spec, row=row, col=col, state=state, record=record, reduce=reduce)
    made = quantize(x, spec, row=True, state=state, record=record, reduce=reduce).row
    bytes_ = gathered_rows(made, spec, tokens, x.shape[1])
    return Quantized(
        padded(bytes_, spec, pad_rows=False) if row else None,
        columns(bytes_, spec) if col else None,
    )


def gathered_rows(mine: Part, spec: CastSpec, tokens: Tokens, width: int) -> Part:
    """Row data of all tokens of those of this rank, which may be padded to more than `width`."""
    data = tokens.gather(sendable(mine.data[:, :width])).view(spec.dtype)
    one = spec.granularity is ScalingGranularity.TENSORWISE
    return Part(data, mine.scale if one else tokens.gather(mine.scale))


def product(
    a: Part, b: Part | HeldPart, gemm: Gemm, dtype: torch.dtype, rows: int, columns: int
) -> Tensor:
    """Any of the three GEMMs: `a @ b.T` [rows, columns], without what padding added."""
    if isinstance(b, HeldPart):
        x = product_with_held(a, b, gemm=gemm, out_dtype=dtype)
    else:
        x = matmul(a, b, gemm=gemm, out_dtype=dtype)
    if x.shape[1] != columns:  # contiguous, so that `.view()` and in-place ops work
        return x[:rows, :columns].contiguous()
    # A compiler is not asked, since it would compile again for numbers that need no padding.
    pads_rows = gemm.granularities[0] is ScalingGranularity.BLOCK_1x128
    if (pads_rows and torch.compiler.is_compiling()) or x.shape[0] != rows:
        return x[:rows]
    return x


class Call(NamedTuple):
    """One call of a layer: what its autograd function takes besides tensors, and keeps."""

    plan: LinearPlan
    scales: DelayedScales
    across: Across
    record: bool
    """Whether `scales` learn amaxes."""
    need_grad_input: bool
    need_grad_weight: bool
    keep_input: bool
    """Whether to save the input itself, not its column data, for a grad_weight in float8."""


class Saved(NamedTuple):
    """Results of forward that backward reads."""

    tensors: tuple[Tensor | None, ...]
    """The input [M, K] in high precision or as row data, or its column data [K, M], None if there
    is no grad_weight; its scale; and a `KeptWeight`."""
    input_is_transposed: bool
    weight_is_transposed: bool
    columns_of: Any
    """The `Columns` that all layers share which read one `Float8Tensor`; eager mode only."""


class _Linear(torch.autograd.Function):
    """`output = input @ weight.T` with each GEMM in float8 or high precision, as planned."""

    @staticmethod
    def compute(
        input: Tensor, weight: Tensor, ready: Quantized | None, call: Call
    ) -> tuple[Tensor, Saved]:
        """`output` [M, N], dtype of `input`; arguments are those of `apply_linear`.

        But `input` is [M, K] in the compute dtype.
        """
        plan, scales, across, record = call.plan, call.scales, call.across, call.record
        float8_grad_weight = call.need_grad_weight and plan.grad_weight is not None
        saved_input: Tensor | None = None
        input_scale: Tensor | None = None
        weight_scale: Tensor | None = None
        x_col: Part | None = None
        columns_of = None

        if plan.output is not None:
            col = float8_grad_weight and plan.share_input and not call.keep_input
            spec, state = plan.input, scales.input
            if isinstance(input, Float8Tensor):
                x = input_in_float8(input, plan)
                record_amax(state if record else None, x.amax)
            else:
                x = quantize(
                    input, spec, row=True, col=col, state=state, record=record,
                    reduce=across.input, fuse_amax=True,
                )  # fmt: skip
            w = weight_rows(weight, ready, plan.weight, scales.weight, record, across)
            y = product(x.row, w, plan.output, input.dtype, input.shape[0], weight.shape[0])
            x_col, input_scale, weight_scale = x.col, x.row.scale, w.scale
        else:
            y = input @ weight.to(input.dtype).t()

        if float8_grad_weight and not plan.share_input:
            spec, state = plan.input_for_grad_weight, scales.input_for_grad_weight
            reduce = across.input
            x_col = quantize(input, spec, col=True, state=state, record=record, reduce=reduce).col
        if x_col is not None:
            saved_input, input_scale = x_col
        elif call.need_grad_weight and isinstance(input, Float8Tensor):
            saved_input = input._data
            if not torch.compiler.is_compiling():
                columns_of = input._columns.expect()
        elif call.need_grad_weight:
            # Compiled code does not notice if somebody writes into what it keeps. Where nobody
            # does, the compiler drops the copy.
            saved_input = input.clone() if torch.compiler.is_compiling() else input

        ready = ready if plan.share_weight else None
        kept = KeptWeight(None, None, None)
        if call.need_grad_input:
            kept = kept_weight(weight, ready, weight_scale)
        saved = Saved(
            (saved_input, input_scale, *kept),
            input_is_transposed=x_col is not None,
            weight_is_transposed=ready is not None and ready.col is not None,
            columns_of=columns_of,
        )
        return y if across.output is None else across.output.scatter(y), saved

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        ready: Quantized | None,
        call: Call,
        computed: tuple[Tensor, Saved] | None,
    ) -> Tensor:
        """The output; `computed` if a compiler has traced that by now."""
        if computed is None:
            y, saved = _Linear.compute(input, weight, ready, call)
        else:
            y, saved = own(computed[0]), computed[1]
        ctx.save_for_backward(*saved.tensors)
        ctx.call, ctx.how_saved = call, saved[1:]
        ctx.shape, ctx.weight_dtype = weight.shape, weight.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """`grad_input` [M, K], dtype of grad_output; `grad_weight` [N, K], dtype of weight."""
        if not torch.compiler.is_compiling() and (
            (functorch_levels is not None and functorch_levels() is not None)
            or (is_batch_of_gradients is not None and is_batch_of_gradients(grad_output))
        ):
            raise RuntimeError(f"Float8Linear: got a backward within torch.func{_NO_TRANSFORM}")
        call: Call = ctx.call
        plan, scales, across, record = call.plan, call.scales, call.across, call.record
        input_is_transposed, weight_is_transposed, columns_of = ctx.how_saved
        saved_input, input_scale, *of_weight = ctx.saved_tensors
        kept = KeptWeight(*of_weight)
        (N, K), dtype, M = ctx.shape, grad_output.dtype, grad_output.shape[0]

        gemm_for_input = plan.grad_input if call.need_grad_input else None
        gemm_for_weight = plan.grad_weight if call.need_grad_weight else None
        row, col = gemm_for_input is not None, gemm_for_weight is not None
        g = Quantized()
        spec, state = plan.grad_output, scales.grad_output
        tokens, reduce = across.output, across.grad_output
        if tokens is not None:
            M *= tokens.ranks
            if not plan.casts_grad_output_once():
                grad_output, tokens, reduce = tokens.gather(grad_output), None, None
        shared_col = col and plan.share_grad_output
        if row or shared_col:
            g = cast_tokens(
                grad_output, spec, tokens, row=row, col=shared_col, state=state, record=record,
                reduce=reduce,
            )  # fmt: skip

        dx: Tensor | None = None
        if gemm_for_input is not None:
            spec, state = plan.weight_for_grad_input, scales.weight_for_grad_input
            if plan.share_weight:
                of, after = scales.weight, g.row.scale
                w = weight_columns(kept, spec, of, weight_is_transposed, after)
            else:
                of_all, weight = across.weight, kept.data
                w = quantize(weight, spec, col=True, state=state, record=record, reduce=of_all).col
            dx = product(g.row, w, gemm_for_input, dtype, M, K)
        elif call.need_grad_input:
            dx = grad_output @ kept.data.to(dtype)

        dw: Tensor | None = None
        if gemm_for_weight is not None:
            if not plan.share_grad_output:
                spec, state = plan.grad_output_for_grad_weight, scales.grad_output_for_grad_weight
                g = quantize(grad_output, spec, col=True, state=state, record=record, reduce=reduce)
            x = Part(saved_input, input_scale)
            if columns_of is not None:
                x = columns_of.of(x, plan.input)
            elif not input_is_transposed:
                x = recast(saved_input, plan.input, input_scale)
            dw = product(g.col, x, gemm_for_weight, ctx.weight_dtype, N, K)
        elif call.need_grad_weight:
            dw = (grad_output.t() @ saved_input).to(ctx.weight_dtype)

        return dx, dw, None, None, None

    @staticmethod
    def symbolic(*_: Any) -> Any:
        """Called by `torch.onnx.export`, where it exports what TorchScript traced."""
        raise RuntimeError(NO_ONNX)
