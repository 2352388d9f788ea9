"""Linear layers of experts as one function: rows of each expert times the weight of the expert."""

from typing import Any

import torch
from torch import Tensor

from float8.autograd import computed_before
from float8.config import ConfigOrRecipe, Float8Weights, ScalingGranularity, as_config
from float8.experts.grouped import Grouped, GroupedTransposed
from float8.experts.plan import plan_experts
from float8.formats import GEMM_ALIGNMENT, HIGH_PRECISION_DTYPES
from float8.linear.functional import Call, Linear, autocast_dtype
from float8.linear.plan import LinearPlan
from float8.linear.weight import InFloat8, OnTheFly, Weight
from float8.tensor import Float8Tensor


def grouped_linear(
    input: Tensor, weight: Tensor, offs: Tensor, *, config: ConfigOrRecipe | None = None
) -> Tensor:
    """Multiply each expert's rows by its weight, with float8 grouped GEMMs in forward and backward.

    Computes `input[offs[e - 1]:offs[e]] @ weight[e].T` for each expert e, like `F.grouped_mm(input,
    weight.mT, offs=offs)`. New group sizes need no recompilation and, unless emulated, no sync.

    Args:
        input: [T, K] float32, bfloat16 or float16, rows sorted by expert; converted to the dtype
            of autocast if that is enabled. Rows from `offs[-1]` on belong to no expert.
        weight: [E, N, K], a matrix [N, K] for each expert, of the dtype of `input` unless autocast
            is enabled. N and K are multiples of 16, unless the config has `emulate=True`. For
            weights stored as [E, K, N] pass `weight.transpose(1, 2)`, which is not copied.
        offs: [E] int32, ascending, on the same device: `offs[e]` is one past the last row of expert
            e. Groups may be empty. On a GPU values are not checked, but clamped to 0..T and to
            their running maximum.
        config: a `Float8LinearConfig`, or a recipe's name; None means `"rowwise"`. One scale covers
            an expert's rows or weight under `"tensorwise"`; under `"blockwise"` 128 elements along
            the contraction dim, within a group, or 128x128 of a weight; under `"mxfp8"` 32 elements
            along that dim. All casts are to e4m3. `gemm_config_output.use_fast_accum` holds for all
            three GEMMs, but sums of blocks are always added in float32.

    Returns:
        [T, N], dtype of the (autocast) input. Rows from `offs[-1]` on and their gradient are zero.

    Raises:
        TypeError: a dtype is not as above, `input` or `weight` is a DTensor, or `config` is neither
            a configuration nor a name.
        ValueError: a shape or device is not as above; a recipe is unknown; on a CPU, `offs` descend
            or are not in 0..T; or the config has delayed scaling, 1x128 blocks for weights, output
            or grad_input in high precision, or not `float8_weights=ON_THE_FLY` (casts per call).
        RuntimeError: `config.emulate` is False, and the GPU (in eager mode) has no such GEMM or,
            under `"blockwise"`, Triton is older than 3.6.
    """
    config = as_config("rowwise" if config is None else config)
    if config.float8_weights is not Float8Weights.ON_THE_FLY:
        raise ValueError(
            f"grouped_linear: got a config with {config.float8_weights}, which belongs to a module "
            f"that is converted, expected float8_weights=Float8Weights.ON_THE_FLY"
        )
    return apply_grouped(input, weight, offs, plan_experts(config), config.emulate)


def apply_grouped(
    input: Tensor,  # [T, K], rows sorted by expert; converted to the dtype of autocast, if enabled
    weight: Tensor,  # [E, N, K]; a `Float8Tensor` must have scales [E, N, 1] or the plan's blocks
    offs: Tensor,  # [E] int32, ascending: one past the last row of each expert
    plan: LinearPlan,  # the casts and the three GEMMs, as `plan_experts` returns them
    emulated: bool,  # whether `plan` emulates its GEMMs; if not, N and K are multiples of 16
    held_weight: Weight | None = None,  # float8 casts of `weight` to use; None: cast it here
) -> Tensor:
    """Return `input[offs[e - 1]:offs[e]] @ weight[e].T` for all experts e, as one tensor [T, N]."""
    autocast, compiling = autocast_dtype(input.device), torch.compiler.is_compiling()
    if autocast is not None:
        input = input.to(autocast)
    _require(input, weight, offs, same_dtype=autocast is None, emulated=emulated)
    # Skip the ops if there are no rows; not on CPUs, where the ops check `offs`, nor in compiled
    # code, where the number of rows may be an unbacked size.
    if not compiling and input.shape[0] == 0 and not input.is_cpu:
        matrix = weight[0]  # any expert's: the product is empty
        matrix = matrix.to_original_precision() if isinstance(matrix, Float8Tensor) else matrix
        return input @ matrix.to(input.dtype).t()
    grad, K = torch.is_grad_enabled(), weight.shape[2]
    need_grads = grad and input.requires_grad, grad and weight.requires_grad
    stored: Any = held_weight or OnTheFly(weight)
    if isinstance(weight, Float8Tensor):
        planned = plan.casts.weight.config.scaling_granularity
        required = planned if planned.by_blocks else ScalingGranularity.AXISWISE  # scales [E, N, 1]
        if weight._granularity is not required or (weight._is_transposed and not planned.square):
            got, expected = f"weight in float8 under {weight._scaling}", f"scales of {planned}"
            raise ValueError(f"grouped_linear: got a {got}, expected {expected}")
        stored = InFloat8(weight._data, weight._scale)
    # If the held Parameter is [E, K, N], `weight` is a transposed view of it.
    transposed = held_weight is not None and weight.stride() != stored.values.stride()
    products = GroupedTransposed if transposed else Grouped
    call = Call(plan, plan.casts, products, type(stored), K, weight.dtype, *need_grads)
    args = input.contiguous(), weight, stored, call
    computed = computed_before(Linear, *args, offs) if compiling else None
    return Linear.apply(*args, computed, offs)  # type: ignore[no-any-return, no-untyped-call]


def _require(
    input: Tensor, weight: Tensor, offs: Tensor, *, same_dtype: bool, emulated: bool
) -> None:  # same_dtype: dtypes must be equal; emulated: N and K need not be multiples of 16
    """Raise `TypeError` or `ValueError` if dtypes, devices or shapes suit no grouped GEMM."""
    got = "grouped_linear: got"
    for name, x in (("input", input), ("weight", weight)):
        if hasattr(x, "device_mesh"):
            raise TypeError(f"{got} a DTensor as {name}, expected a plain one; call .to_local()")
        if x.dtype not in HIGH_PRECISION_DTYPES:
            expected = ", ".join(map(str, HIGH_PRECISION_DTYPES))
            raise TypeError(f"{got} {name} of dtype {x.dtype}, expected one of {expected}")
    if same_dtype and input.dtype != weight.dtype:
        dtypes = f"input of dtype {input.dtype} and weight of dtype {weight.dtype}"
        expected = "the same; convert one of them or use torch.autocast"
        raise TypeError(f"{got} {dtypes}, expected {expected}")
    if offs.dtype != torch.int32:
        raise TypeError(f"{got} offs of dtype {offs.dtype}, expected torch.int32")
    shapes = tuple(map(tuple, (input.shape, weight.shape, offs.shape)))
    fits = input.dim() == 2 and weight.dim() == 3 and 0 not in weight.shape
    if not fits or input.shape[1] != weight.shape[2] or offs.shape != weight.shape[:1]:
        raise ValueError(
            f"{got} input, weight and offs of shapes {shapes}, expected [T, K], [E, N, K] and "
            f"[E], none of E, N and K being 0; give those of [E, K, N] as weight.transpose(1, 2)"
        )
    devices = input.device, weight.device, offs.device
    if len({*devices}) > 1:
        names = ", ".join(map(str, devices))
        raise ValueError(f"{got} input, weight and offs on {names}, expected one device")
    if not emulated and (weight.shape[1] % GEMM_ALIGNMENT or weight.shape[2] % GEMM_ALIGNMENT):
        raise ValueError(
            f"{got} weight of shape {tuple(weight.shape)}, expected N and K that are multiples of "
            f"{GEMM_ALIGNMENT}; leave these experts in high precision, or set emulate=True"
        )
