"""`linear`, a float8 linear layer as a function, and `Linear`, the autograd function of layers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.autograd import computed_before, new_alias, once_differentiable
from float8.config import ConfigOrRecipe, as_config
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels.runtime.ops import NO_ONNX
from float8.kernels.runtime.private import compiled_autograd_is_on, functorch_levels, surely
from float8.linear.plan import Casts, LinearPlan, plan_linear
from float8.linear.weight import InFloat8, OnTheFly, Weight
from float8.products import Dense
from float8.quantize import Cast, padded, recast
from float8.scales import Operand
from float8.tensor import Float8Tensor, local_tensor

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
    """Compute `input @ weight.T + bias` with the float8 GEMMs of `config`, forward and backward.

    Args:
        input: [..., K] float32, bfloat16 or float16, under autocast converted to its dtype; or a
            `Float8Tensor`, cast as `config` says.
        weight: [N, K]; has the dtype of `input` unless under autocast; or such a `Float8Tensor`.
        bias: [N] or None.
        config: a `Float8LinearConfig`, or the name of a recipe. None means dynamic tensorwise
            scaling. Delayed scaling, which keeps state, needs a `Float8Linear` instead.

    Returns:
        [..., N], in the dtype of `input`, or of autocast if that converts it.

    Raises:
        TypeError: the dtypes of `input` and `weight` differ without autocast or are not supported;
            `input` or `weight` is a DTensor; or `config` is neither a configuration nor a name.
        ValueError: a shape or `Float8Tensor` is not as above; no such recipe; or delayed scaling.
        RuntimeError: the device has no float8 GEMM and `config.emulate` is False; or the call is
            in a transform of torch.func, such as `grad` or `vmap`, or in ONNX export.
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
    input: Tensor,  # [..., K], in high precision, or a `Float8Tensor` cast as `casts` says
    weight: Tensor,  # [N, K], likewise
    bias: Tensor | None,  # [N]
    plan: LinearPlan,  # which GEMMs run in float8, and how
    casts: Casts,  # of `plan`, perhaps with stored scales, or with amaxes reduced over ranks
    held_weight: Weight | None = None,  # casts kept by `Float8Weights.HELD`; None: use `weight`
    products: Any = None,  # with functions that cast and multiply; None: those of class `Dense`
) -> Tensor:
    """Compute `input @ weight.T + bias` with the casts and GEMMs of `plan`, after argument checks.

    Returns [..., N], or [M, N] if `products` is given, which may gather rows from other ranks or
    scatter them. Raises the errors of `linear` for tensors, and a `RuntimeError` for a compiled
    forward with delayed scaling of grad_output within compiled autograd.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and functorch_levels is not None and functorch_levels() is not None:
        raise RuntimeError(f"Float8Linear: got a call within torch.func{_NO_TRANSFORM}")
    # Checked in each call, since Dynamo still traces a call after one that broke the graph.
    if compiling and casts.grad_output.source is not None and compiled_autograd_is_on():
        # Backward writes an amax that forward hands over: torch loses such writes of a compiled
        # forward. At this error Dynamo runs the layer in eager mode instead, unless with fullgraph.
        raise RuntimeError(
            "Float8Linear: got a compiled forward with ScalingType.DELAYED for grad_output within "
            "compiled autograd, expected one of the two: leave the forward in eager mode, or "
            "compile without compiled autograd, or scale grad_output dynamically"
        )
    if hasattr(input, "device_mesh") or hasattr(weight, "device_mesh"):
        roles = "weight" if hasattr(weight, "device_mesh") else "input and none as weight"
        raise TypeError(
            f"Float8Linear: got a DTensor as {roles}, expected plain tensors, or a Float8Linear "
            f"whose weight and input both are DTensors; use Float8ColwiseParallel or "
            f"Float8RowwiseParallel, or .to_local() for parts that may have scales of their own"
        )
    grad, K = torch.is_grad_enabled(), weight.shape[1]
    input = in_compute_dtype(input, weight)
    empty = surely(input.numel() == 0) if compiling else input.numel() == 0  # has no amax
    if empty or plan.output is None:  # a GEMM in high precision
        input = input.to_original_precision() if isinstance(input, Float8Tensor) else input
        weight = weight.to_original_precision() if isinstance(weight, Float8Tensor) else weight
    elif isinstance(input, Float8Tensor):
        gemms = plan.output, plan.grad_weight  # the latter may be None
        # The scales of `input` need not be powers of two, whatever the plan assumes.
        if any(gemm and gemm.powers_of_2 for gemm in gemms) and not input._granularity.exponents:
            output_gemm, dw_gemm = [gemm and gemm._replace(powers_of_2=False) for gemm in gemms]
            plan = plan._replace(output=output_gemm, grad_weight=dw_gemm)
    if empty:
        output = input @ weight.to(input.dtype).t()
    else:
        rows = input if input.dim() == 2 else input.reshape(-1, K)
        need_grads = grad and input.requires_grad, grad and weight.requires_grad
        if isinstance(weight, Float8Tensor):
            other_gemm = None if plan.reuse_weight else "grad_input"
            stored: Any = InFloat8(*operand_of("weight", weight, casts.weight, other_gemm))
        else:
            stored = held_weight or OnTheFly(weight)
        settings = Call(plan, casts, products or Dense, type(stored), K, weight.dtype, *need_grads)
        args = rows, weight, stored, settings
        computed = computed_before(Linear, *args) if compiling else None
        output = Linear.apply(*args, computed)  # type: ignore[no-untyped-call]
    if input.dim() != 2 and products is None:
        # No view: FSDP2 warns of modules that return views, and restricts writes into them.
        output = torch.ops.aten._unsafe_view.default(output, [*input.shape[:-1], output.shape[-1]])
    return output if bias is None else output + bias.to(output.dtype)


def in_compute_dtype(input: Tensor, weight: Tensor) -> Tensor:
    """Return `input`, converted to the dtype of autocast if that is enabled, after checks.

    A `Float8Tensor` is returned as it is. Raises a `TypeError` if a dtype is not float32, bfloat16
    or float16, or if, without autocast, `weight` has another than an `input` not in float8; and a
    `ValueError` if their last dims differ. Both may be DTensors.
    """
    autocast = autocast_dtype(input.device)
    dtypes_fit = autocast is not None or input.dtype == weight.dtype  # autocast converts `input`
    if not dtypes_fit and not isinstance(local_tensor(input), Float8Tensor):
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
        got, expected = f"input of shape {tuple(input.shape)}", f"[..., {weight.shape[1]}]"
        raise ValueError(f"Float8Linear: got {got}, expected {expected}")
    if autocast is None or isinstance(local_tensor(input), Float8Tensor):
        return input
    return input.to(autocast)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of GEMMs under autocast on `device`; None if it is off, or on meta."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # "meta" has none
        return None
    return torch.get_autocast_dtype(device.type)


def operand_of(role: str, x: Float8Tensor, cast: Cast, other_gemm: str | None) -> Operand:
    """Return data and scale of `x`, already in float8, for a layer that would cast it by `cast`.

    `cast.source`, of delayed scaling, records `x._amax`, if any. Raises a `ValueError`, in which
    `role` ("input" or "weight") names `x`, if `x` is transposed, or differs from `cast` in format
    or granularity; or if `other_gemm` is not None: the name of a GEMM of the layer that needs
    another cast of the tensor, which cannot be made from float8.
    """
    config = cast.config
    fits = x._data.dtype == config.dtype and x._granularity is config.scaling_granularity
    if not fits or x._is_transposed or other_gemm is not None:
        raise ValueError(
            f"Float8Linear: got {role} in {x._data.dtype} under {x._scaling}, expected one in high "
            f"precision: it is to be cast to {config.dtype} under {config.scaling_granularity}"
            f"{'' if other_gemm is None else f', and in another way for {other_gemm}'}; call "
            f"{role}.to_original_precision(), or configure its casts alike"
        )
    if cast.source is not None and x._amax is not None:
        cast.source.observe(x._amax)
    return Operand(x._data.contiguous(), x._scale)


class Call(NamedTuple):
    """Settings of one call of the autograd function `Linear`: casts, GEMMs, gradients needed."""

    plan: LinearPlan
    casts: Casts
    products: Any  # `Dense`, or a class with the same attributes, which quantizes and multiplies
    weight_class: Any  # multiplies by the weight: `OnTheFly`, or another class like `Weight`
    in_features: int  # K
    weight_dtype: torch.dtype  # of grad_weight
    need_grad_input: bool
    need_grad_weight: bool


class Linear(torch.autograd.Function):
    """Compute `input @ weight.T`, each GEMM of forward and backward in float8 or in high precision.

    output       [M, N] = input @ weight.T          row(input),         row(weight)
    grad_input   [M, K] = grad_output @ weight      row(grad_output),   col(weight)
    grad_weight  [N, K] = grad_output.T @ input     col(grad_output),   col(input)

    Row data (row) are a float8 cast in the layout of the tensor, column data (col) transposed.
    """

    @staticmethod
    def compute(
        input: Tensor, weight: Tensor, stored: Any, settings: Call, *group_ends: Tensor
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the output [M, N], in the dtype of `input` [M, K], and the tensors for backward.

        `stored`, a `Weight`, multiplies by `weight` [N, K], or by float8 data of it. `group_ends`
        is empty, or for experts one tensor: the ends of the rows of each. The tensors are `(rows,
        rows_scale, col_data, col_scale, *fields of stored, *group_ends)`; None: not needed.
        Backward computes grad_weight from `col_data` and `col_scale`, column data (the transposed
        cast) of `input`; or else from `rows`, `input` or its float8 data, and `rows_scale`.
        """
        plan, casts, products = settings.plan, settings.casts, settings.products
        compiling = torch.compiler.is_compiling()
        dw_in_float8 = settings.need_grad_weight and plan.grad_weight is not None  # dw: grad_weight
        row: Any = None
        col: Any = None
        rows, fields = None, tuple(stored)  # what backward needs of the input and the weight
        if plan.output is None:
            y = input @ weight.to(input.dtype).t()
        else:
            if isinstance(input, Float8Tensor):
                # Column data cannot be cast from high precision, only made from the row data.
                other_gemm = None if plan.input_rows_suffice else "grad_weight"
                row = operand_of("input", input, casts.input, other_gemm)
                row = padded(row, casts.input.config.scaling_granularity, pad_rows=False)
            else:
                # Compiled code makes column data in backward, so that the compiler may choose
                # whether to keep them, `input`, or tensors from which it computes `input` again.
                col_in_backward = compiling and products.columns_from_values
                col_now = dw_in_float8 and plan.reuse_input and not col_in_backward
                row, col = products.quantize_rows(
                    input, casts.input, *group_ends, row=True, col=col_now, traced=True
                )
            shape = input.shape[0], weight.shape[-2]  # read here: torch.jit.trace records it
            y, fields = stored.output(row, shape, group_ends, settings, input.dtype)
        if products.scatter is not None:
            y = products.scatter(y)
        if dw_in_float8 and not plan.reuse_input:
            cast = casts.input_for_grad_weight
            _, col = products.quantize_rows(input, cast, *group_ends, col=True)
        if col is None and settings.need_grad_weight:
            if isinstance(input, Float8Tensor):
                rows = input._data
            elif products.keeps_row_data:
                rows = row.data  # gathered from all ranks; `input` has the rows of this rank only
            else:
                # A compiled backward does not check if `input` was written in place. The compiler
                # drops the copy if nothing writes it.
                rows = input.clone() if compiling else input
        rows_scale = None if rows is None or row is None else row.scale
        col_data, col_scale = (None, None) if col is None else col[:2]  # experts have more fields
        if not settings.need_grad_input:  # backward does not read the weight
            fields = (None,) * len(fields)
        return y, (rows, rows_scale, col_data, col_scale, *fields, *group_ends)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # [M, K]
        weight: Tensor,  # [N, K], or for experts [E, N, K]
        stored: Any,  # a `Weight`, which multiplies by `weight`, or by float8 data of it
        settings: Call,
        computed: Any,  # what `compute` returned for the other arguments; None: call it here
        *group_ends: Any,  # empty, or for experts one tensor: the ends of the rows of each
    ) -> Tensor:
        """Return the output [M, N], and save on `ctx` what backward needs."""
        if computed is None:
            y, saved = Linear.compute(input, weight, stored, settings, *group_ends)
        else:
            y, saved = computed
            y = new_alias(y)
        ctx.save_for_backward(*saved)
        ctx.settings = settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `input` and `weight`, or None; and None for other arguments."""
        compiling = torch.compiler.is_compiling()
        if not compiling and functorch_levels is not None and functorch_levels() is not None:
            raise RuntimeError(f"Float8Linear: got a backward within torch.func{_NO_TRANSFORM}")
        settings: Call = ctx.settings
        plan, casts, products = settings.plan, settings.casts, settings.products
        rows, rows_scale, col_data, col_scale, *rest = ctx.saved_tensors
        count, dtype = len(settings.weight_class._fields), grad_output.dtype
        stored, group_ends = settings.weight_class(*rest[:count]), rest[count:]
        dx_in_float8 = settings.need_grad_input and plan.grad_input is not None  # dx: grad_input
        dw_in_float8 = settings.need_grad_weight and plan.grad_weight is not None  # dw: grad_weight
        reuse = dw_in_float8 and plan.reuse_grad_output
        (M, N), K, row, col = grad_output.shape, settings.in_features, None, None
        if dx_in_float8 or reuse:
            row, col = products.quantize_grad(
                grad_output, casts.grad_output, *group_ends, row=dx_in_float8, col=reuse
            )
        dx = dw = None
        if dx_in_float8:
            dx = stored.grad_input(row, (M, K), group_ends, settings, dtype)
        elif settings.need_grad_input:
            dx = grad_output @ stored.values.to(dtype)
        if dx is not None and products.start is not None:
            dx = products.start(dx)  # a reduce-scatter, which overlaps the GEMM of grad_weight
        if dw_in_float8:
            if not reuse:
                cast = casts.grad_output_for_grad_weight  # assigning `row` next frees row data
                row, col = products.quantize_grad(
                    grad_output, cast, *group_ends, row=False, col=True
                )
            input_col = Operand(col_data, col_scale)
            if col_data is None:  # forward kept `input` or its row data
                input_col = recast(rows, casts.input.config, rows_scale)
            options: Any = {"gemm": plan.grad_weight, "out_dtype": settings.weight_dtype}
            dw = products.grad_weight(col, input_col, (N, K), *group_ends, **options)
        elif settings.need_grad_weight:
            dw = products.outer(grad_output, rows, *group_ends).to(settings.weight_dtype)
        if dx is not None and products.finished is not None:
            dx = products.finished(dx)  # waits for the reduce-scatter
        return dx, dw, None, None, None, *[None] * len(group_ends)

    @staticmethod
    def symbolic(*_: Any) -> Any:
        """Raise a `RuntimeError`; the TorchScript-based `torch.onnx.export` calls this method."""
        raise RuntimeError(NO_ONNX)
