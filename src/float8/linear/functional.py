"""A linear layer in float8 as a function, and its autograd function.

What is saved for backward is float8: the transposed copy of the input, made in the same read as
its row data; or the input itself under a compiler, which chooses what to keep. Of the weight only
what exists anyway is kept: see `KeptWeight`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.autograd import computed_before, once_differentiable, own
from float8.config import ConfigOrRecipe, as_config
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.runtime.ops import NO_ONNX
from float8.kernels.runtime.private import (
    compiled_autograd_is_on,
    functorch_levels,
    is_batch_of_gradients,
    surely,
)
from float8.linear.call import (
    KeptWeight,
    LinearCall,
    cast_and_gather,
    input_in_float8,
    record,
    weight_in_float8,
)
from float8.linear.plan import Casts, LinearPlan, plan_linear
from float8.quantize import quantize, recast
from float8.scales import Operand, Quantized
from float8.tensor import Float8Tensor, local_tensor
from float8.tensor.ranks import SharedTokens, arrived

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
    config = as_config(config, keep=False)
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
    return apply_linear(input, weight, bias, plan, plan.casts)


def apply_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    casts: Casts,
    ready: Quantized | None = None,
    input_tokens: SharedTokens | None = None,
    output_tokens: SharedTokens | None = None,
) -> Tensor:
    """Compute for `linear` and `Float8Linear` what they have in common.

    Args:
        input: as for `linear`; or a `Float8Tensor`, cast as planned.
        weight: as for `linear`.
        bias: as for `linear`.
        plan: which GEMMs run how.
        casts: those of the plan, with the state and the ranks of this call.
        ready: the weight in float8, where it is that already; a `Float8Tensor` need not be told.
        input_tokens: where ranks share the tokens of the input, and each multiplies all.
        output_tokens: where the output is a sum over ranks, of which each keeps its tokens.
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
    grad, (N, K) = torch.is_grad_enabled(), weight.shape
    input = check_input(input, weight)
    if plan.output is None and isinstance(input, Float8Tensor):
        input = input.to_original_precision()
    empty = input.numel() == 0
    if surely(empty) if compiling else empty:  # nothing to measure, nothing to multiply
        if isinstance(weight, Float8Tensor):
            weight = weight.to_original_precision()
        output = input @ weight.to(input.dtype).t()
    else:
        rows = input if input.dim() == 2 else input.reshape(-1, K)
        need_grad_weight = grad and weight.requires_grad
        if not plan.pad and need_grad_weight and plan.grad_weight is not None:
            M = rows.shape[0] * (1 if input_tokens is None else input_tokens.ranks)
            if surely(M != 0):
                what = f"{M} tokens (all leading dims) for grad_weight"
                require_aligned(what, (M,), plan.alignment)
            else:  # data decide how many there are, and compiled code raises when it runs
                torch._check(M % plan.alignment == 0)  # type: ignore[no-untyped-call]
        if ready is None and isinstance(weight, Float8Tensor):
            ready = weight_in_float8(weight, plan)
        call = LinearCall(
            plan, casts, input_tokens, output_tokens, K, N, weight.dtype,
            need_grad_input=grad and input.requires_grad, need_grad_weight=need_grad_weight,
        )  # fmt: skip
        made = computed_before(_Linear, rows, weight, call, ready) if compiling else None
        output = _Linear.apply(rows, weight, call, ready, made)  # type: ignore[no-untyped-call]
    if input.dim() != 2:  # an op that changes nothing is still a node of the graph to issue
        output = with_leading_dims(output, input, input_tokens, output_tokens)
    return output if bias is None else output + bias.to(output.dtype)


def check_input(input: Tensor, weight: Tensor) -> Tensor:
    """Return `input` in the compute dtype, which autocast may choose; raises as `linear` does."""
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
    """Return the dtype in which autocast has GEMMs compute on a device; None: it is off."""
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


def with_leading_dims(
    rows: Tensor,
    like: Tensor,
    input_tokens: SharedTokens | None = None,
    output_tokens: SharedTokens | None = None,
) -> Tensor:
    """Return [M, N] with the leading dims of `like` [..., K]; no view, as nobody else holds `rows`.

    With shared tokens the output has more rows than `like` (gathered) or fewer (scattered).

    FSDP2 warns of modules that return views, and writing into them in place is restricted.
    """
    shape = [*like.shape[:-1], rows.shape[-1]]
    if input_tokens is not None:
        shape[input_tokens.dim] *= input_tokens.ranks
    if output_tokens is not None:
        shape[output_tokens.dim] //= output_tokens.ranks
    return torch.ops.aten._unsafe_view.default(rows, shape)  # type: ignore[no-any-return]


class Saved(NamedTuple):
    """Results of forward that backward reads."""

    input: Tensor | Any
    """The input [M, K] in high precision or as row data, or its column data [K, M]; None if there
    is no grad_weight."""
    input_scale: Tensor | None
    weight: KeptWeight
    input_is_transposed: bool


class _Linear(torch.autograd.Function):
    """`output = input @ weight.T` with each GEMM in float8 or high precision, as planned."""

    @staticmethod
    def compute(
        input: Tensor, weight: Tensor, call: LinearCall, ready: Quantized | None
    ) -> tuple[Tensor, Saved]:
        """Multiply an input [M, K] in the compute dtype by a weight [N, K], to [M, N]."""
        plan, casts, need_grad_weight = call.plan, call.casts, call.need_grad_weight
        float8_grad_weight = need_grad_weight and plan.grad_weight is not None
        compiling, tokens = torch.compiler.is_compiling(), call.input_tokens
        kept, x = KeptWeight(weight), Quantized()
        input_scale = None
        M = input.shape[0]
        if tokens is not None:  # ranks share them, and each multiplies all
            M *= tokens.ranks
            if not plan.input_rows_suffice:
                input, tokens = tokens.gather(input), None

        if plan.output is not None:
            if isinstance(input, Float8Tensor):
                x = input_in_float8(input, plan)
                record(casts.input, x.amax)
            else:
                col = float8_grad_weight and plan.share_input and not compiling
                if tokens is None:
                    x = quantize(input, casts.input, row=True, col=col, traced=True)
                else:
                    x = cast_and_gather(input, casts.input, tokens, row=True, col=col, traced=True)
            y, kept = call.output(x.row, weight, ready, input.dtype, M)
            input_scale = x.row.scale
        else:
            y = input @ weight.to(input.dtype).t()

        x_col = x.col
        if float8_grad_weight and not plan.share_input:
            x_col = quantize(input, casts.input_for_grad_weight, col=True).col
        saved_input: Tensor | None = None
        if x_col is not None:
            saved_input, input_scale = x_col
        elif need_grad_weight and isinstance(input, Float8Tensor):
            saved_input = input._data
        elif need_grad_weight and tokens is not None:
            saved_input = x.row.data  # those of all ranks
        elif need_grad_weight:
            # Compiled code does not notice if somebody writes into what it keeps. Where nobody
            # does, the compiler drops the copy.
            saved_input = input.clone() if compiling else input
        if not call.need_grad_input:
            kept = KeptWeight()
        elif not plan.share_weight:  # it is cast anew
            kept = KeptWeight(weight)
        saved = Saved(saved_input, input_scale, kept, x_col is not None)
        if call.output_tokens is not None:
            y = arrived(call.output_tokens.scatter(y))
        return y, saved

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        call: LinearCall,
        ready: Quantized | None,
        computed: tuple[Tensor, Saved] | None,
    ) -> Tensor:
        """Return the output; `computed` if a compiler has traced that by now."""
        if computed is None:
            y, saved = _Linear.compute(input, weight, call, ready)
        else:
            y, saved = own(computed[0]), computed[1]
        ctx.save_for_backward(saved.input, saved.input_scale, *saved.weight)
        ctx.input_is_transposed = saved.input_is_transposed
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return `grad_input` [M, K], dtype of grad_output; `grad_weight` [N, K], as the weight."""
        if not torch.compiler.is_compiling() and (
            (functorch_levels is not None and functorch_levels() is not None)
            or (is_batch_of_gradients is not None and is_batch_of_gradients(grad_output))
        ):
            raise RuntimeError(f"Float8Linear: got a backward within torch.func{_NO_TRANSFORM}")
        call: LinearCall = ctx.call
        plan, casts = call.plan, call.casts
        tokens = call.output_tokens  # grad_output has those of this rank, as the output had
        saved_input, input_scale, *of_weight = ctx.saved_tensors
        kept = KeptWeight(*of_weight)
        dtype, M = grad_output.dtype, grad_output.shape[0]

        if tokens is not None:
            M *= tokens.ranks
            if not plan.grad_output_rows_suffice:
                grad_output, tokens = tokens.gather(grad_output), None
        row = call.need_grad_input and plan.grad_input is not None
        col = call.need_grad_weight and plan.grad_weight is not None
        shared_col = col and plan.share_grad_output
        g = Quantized()
        if (row or shared_col) and tokens is None:
            g = quantize(grad_output, casts.grad_output, row=row, col=shared_col)
        elif tokens is not None:
            g = cast_and_gather(grad_output, casts.grad_output, tokens, row=row, col=shared_col)

        dx: Tensor | None = None
        if row:
            dx = call.grad_input(g.row, kept, dtype, M)
        elif call.need_grad_input:
            dx = grad_output @ kept.data.to(dtype)
        if dx is not None and call.input_tokens is not None:
            dx = call.input_tokens.scatter(dx)  # while grad_weight is computed

        dw: Tensor | None = None
        if col:
            other = casts.grad_output_for_grad_weight
            g_col = g.col if shared_col else quantize(grad_output, other, col=True).col
            x = Operand(saved_input, input_scale)
            if not ctx.input_is_transposed:
                x = recast(saved_input, casts.input.how, input_scale)
            dw = call.grad_weight(g_col, x)
        elif call.need_grad_weight:
            dw = (grad_output.t() @ saved_input).to(call.weight_dtype)
        if dx is not None and call.input_tokens is not None:
            dx = arrived(dx)
        return dx, dw, None, None, None

    @staticmethod
    def symbolic(*_: Any) -> Any:
        """Refuse `torch.onnx.export`, which calls this where it exports what TorchScript traced."""
        raise RuntimeError(NO_ONNX)
