"""A layer of which each rank holds a part: DTensors outside, local tensors in casts and GEMMs.

    weight Shard(0): input Replicate  -> output Shard(-1)    torch's ColwiseParallel
    weight Shard(1): input Shard(-1)  -> output Partial      torch's RowwiseParallel
                                      or output Shard(dim)   Float8RowwiseParallel

One scale per tensor is that of the whole, over all ranks; finer scales are of this rank's part.
All casts and GEMMs run layer by layer; weights are cast on the fly.
"""

import math
from typing import Any, NamedTuple

import torch

from float8.linear.functional import apply_linear, in_compute_dtype
from float8.linear.plan import Casts, LinearPlan
from float8.quantize import Cast
from float8.tensor import Float8Tensor, is_dtensor
from float8.tensor.float8_tensor import to_float8
from float8.tensor.ranks import SharedTokens, dtensor_like, every_rank_gets_some


class Shards(NamedTuple):
    """The style of a layer under tensor parallel; the weight, a DTensor, tells the rest."""

    gathers_input: bool = False
    """Whether ranks gather the tokens of the input; ignored if the weight is Shard(1)."""
    tokens_dim: int | None = None
    """The dim by which to reduce-scatter the output, and gather its gradient; None: by none."""


def linear_of_shards(
    input: Any, weight: Any, bias: Any, shards: Shards, plan: LinearPlan, casts: Casts
) -> Any:
    """Compute `apply_linear` of DTensors on a mesh of one dim; `casts` reduce over its ranks.

    A layer that gathers its input takes it placed in any way, and gathers it in float8 if one cast
    is all that the plan makes of it; a `Float8Tensor` inside is not cast again. The bias is
    Shard(0) with the weight, else Replicate.
    """
    if not is_dtensor(input):
        raise TypeError(
            f"Float8Linear: got an input of type {type(input).__name__} for a weight that is a "
            f"DTensor, expected a DTensor; use a style that prepares it, as Float8ColwiseParallel"
        )
    dtensors, mesh, placements = torch.distributed.tensor, weight.device_mesh, weight.placements
    if input.device_mesh != mesh:
        raise ValueError(
            f"Float8Linear: got an input on {input.device_mesh} for a weight on {mesh}, "
            f"expected one mesh; parallelize both over the same"
        )
    column_parallel = tuple(placements) == (dtensors.Shard(0),)
    if not column_parallel and tuple(placements) != (dtensors.Shard(1),):
        raise ValueError(
            f"Float8Linear: got a weight placed {placements}, expected Shard(0) or Shard(1) on a "
            f"mesh of one dim, as tensor parallel's styles place it"
        )
    require_parts(weight.shape, 0 if column_parallel else 1, mesh.size())
    if column_parallel:
        return _column_parallel(input, weight, bias, shards.gathers_input, plan, casts)
    return _row_parallel(input, weight, bias, shards.tokens_dim, plan, casts)


def _column_parallel(
    input: Any, weight: Any, bias: Any, gathers: bool, plan: LinearPlan, casts: Casts
) -> Any:
    """Multiply all tokens by the rows of the weight that this rank has."""
    dtensors, mesh, local = torch.distributed.tensor, weight.device_mesh, weight.to_local()
    (placement,), enter = input.placements, None
    if gathers and not placement.is_replicate():
        in_float8 = isinstance(input._local_tensor, Float8Tensor)
        if placement.is_shard() and plan.input_rows_suffice and not in_float8:
            enter = _shared_tokens(input, placement.dim)
        if enter is None:  # torch gathers, which knows of summands and of odd sizes
            input = in_compute_dtype(input, weight)
            input = dtensor_in_float8(input, weight, plan, casts.input)
            input = input.redistribute(placements=[dtensors.Replicate()])
    if enter is None:
        _require_placed(input, weight, dtensors.Replicate())
        casts = _without_reduce(casts, "input", "input_for_grad_weight")
    # With `enter` backward already reduce-scatters.
    x = input.to_local(grad_placements=(dtensors.Partial(),) if enter is None else None)
    bias = None if bias is None else bias.to_local()
    y = apply_linear(x, local, bias, plan, casts, enter=enter)
    placed = (dtensors.Shard(y.dim() - 1),)
    whole = torch.empty([*y.shape[:-1], weight.shape[0]], device="meta")  # for its stride
    return dtensors.DTensor.from_local(
        y, mesh, placed, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _row_parallel(
    input: Any, weight: Any, bias: Any, tokens_dim: int | None, plan: LinearPlan, casts: Casts
) -> Any:
    """Multiply the features that this rank has by the columns of the weight that it has."""
    dtensors: Any = torch.distributed.tensor
    dims, to, leave = input.dim(), None, None
    if tokens_dim is not None:
        if not -dims <= tokens_dim < dims:
            raise ValueError(
                f"Float8Linear: got an input of {dims} dims and an output to be sharded along dim "
                f"{tokens_dim}, expected one of them; give the style another output_layouts"
            )
        to = dtensors.Shard(tokens_dim % dims)
        if plan.grad_output_rows_suffice:
            leave = _shared_tokens(input, to.dim)
    _require_placed(input, weight, dtensors.Shard(dims - 1))
    if leave is None:  # grad_output is whole here, with an amax that all ranks find alike
        casts = _without_reduce(casts, "grad_output", "grad_output_for_grad_weight")
    y = apply_linear(input.to_local(), weight.to_local(), None, plan, casts, leave=leave)
    placed = (dtensors.Partial() if leave is None else to,)
    output = dtensors.DTensor.from_local(y, weight.device_mesh, placed, run_check=False)
    if to is not None and leave is None:  # torch sums up, and gathers the gradient
        output = output.redistribute(placements=(to,))
    if bias is None:
        return output
    if torch.is_grad_enabled():  # torch 2.11 refuses it in inference mode
        # A no-op in forward; its backward sums up the gradients of the ranks' tokens.
        bias = bias.redistribute(placements=bias.placements)
    return output + bias.to(output.dtype)


def _require_placed(input: Any, weight: Any, expected: Any) -> None:
    if tuple(input.placements) != (expected,):
        raise ValueError(
            f"Float8Linear: got an input placed {tuple(input.placements)} for a weight placed "
            f"{tuple(weight.placements)}, expected {expected}; redistribute it"
        )


def _without_reduce(casts: Casts, *roles: str) -> Casts:
    """Return casts that reduce nothing for tensors whose amax all ranks find alike."""
    return casts._replace(**{role: getattr(casts, role)._replace(reduce=None) for role in roles})


def _shared_tokens(x: Any, dim: int) -> SharedTokens | None:
    """Return how ranks share the tokens of a DTensor along `dim`; None: torch has to see to it."""
    mesh = x.device_mesh
    if dim == x.dim() - 1 or x.shape[dim] % mesh.size() or 0 in x.shape:
        return None
    group, before = mesh.get_group(0).group_name, math.prod(x.shape[:dim])
    return SharedTokens(group, mesh.size(), dim, before)


def dtensor_in_float8(x: Any, weight: Any, plan: LinearPlan, cast: Cast) -> Any:
    """Cast the DTensor `x` on a mesh of one dim, if its row data suffice for all GEMMs.

    Else return `x` itself, as also where it is a sum still to be made, or where ranks hold parts of
    rows that have a scale each. Raises as `in_compute_dtype`.
    """
    (placement,) = x.placements
    cuts_rows = placement.is_shard() and placement.dim % x.dim() == x.dim() - 1
    if (
        placement.is_partial()
        or (cuts_rows and cast.how.scaling_granularity.by_rows)
        or not plan.input_rows_suffice
        or isinstance(x._local_tensor, Float8Tensor)
    ):
        return x
    x = in_compute_dtype(x, weight)
    if placement.is_replicate():
        cast = cast._replace(reduce=None)
    return dtensor_like(to_float8(x.to_local(), cast), x)


def require_parts(shape: torch.Size, dim: int, ranks: int) -> None:
    """Raise a `ValueError` for a weight that ranks cannot share: of rows each needs one or more."""
    size = shape[dim]
    if size % ranks and (dim == 1 or not every_rank_gets_some(size, ranks)):
        expected = "that dim divisible by" if dim else "rows on each of"
        raise ValueError(
            f"Float8Linear: got a weight of shape {tuple(shape)}, to be sharded along dim {dim} "
            f"over {ranks} ranks, expected {expected} {ranks}"
        )
