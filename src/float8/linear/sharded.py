"""A layer of which each rank holds a part: DTensors outside, local tensors in casts and GEMMs.

    weight Shard(0): input Replicate  -> output Shard(-1)    torch's ColwiseParallel
    weight Shard(1): input Shard(-1)  -> output Partial      torch's RowwiseParallel
                                      or output Shard(dim)   Float8RowwiseParallel

What is spread over ranks is cast under the scale of the whole.
"""

import math
from typing import Any

import torch

from float8.linear.across import Across, Tokens, reduction
from float8.linear.functional import DelayedScales, apply_linear
from float8.linear.plan import LinearPlan


def linear_of_shards(
    input: Any,
    weight: Any,
    bias: Any,
    plan: LinearPlan,
    scales: DelayedScales,
    keep_input: bool,
    tokens_dim: int | None,
    scales_known: bool,
) -> Any:
    """`apply_linear` of DTensors on a mesh of one dim.

    Args:
        input: [..., K], placed as above; a `Float8Tensor` inside is not cast again.
        weight: [N, K], Shard(0) or Shard(1), that dim divisible by the number of ranks.
        bias: [N], Shard(0) with the weight, else Replicate; or None.
        plan: as for `apply_linear`.
        scales: likewise.
        keep_input: likewise.
        tokens_dim: with Shard(1): the dim of Shard that the output gets, which ranks sum up here;
            its gradient is gathered in float8, if one cast is all that the plan makes of it.
        scales_known: whether all ranks have all scales from the same histories.

    Raises:
        TypeError: `input` is no DTensor.
        ValueError: a placement is another one, or a dim cannot be divided evenly.
    """
    placement = torch.distributed.tensor  # somebody made DTensors, so it is imported
    mesh, placements = weight.device_mesh, tuple(weight.placements)
    by_rows = placements == (placement.Shard(0),)
    if not by_rows and placements != (placement.Shard(1),):
        raise ValueError(
            f"Float8Linear: got a weight placed {placements}, expected Shard(0) or Shard(1) on a "
            f"mesh of one dim, as tensor parallel's styles place it"
        )
    if not hasattr(input, "placements"):
        raise TypeError(
            f"Float8Linear: got an input of type {type(input).__name__} for a weight that is a "
            f"DTensor, expected a DTensor; use a style that prepares it, as Float8ColwiseParallel"
        )
    require_divisible(weight.shape, 0 if by_rows else 1, mesh.size())
    last: Any = placement.Shard(input.dim() - 1)
    expected = placement.Replicate() if by_rows else last
    if tuple(input.placements) != (expected,):
        raise ValueError(
            f"Float8Linear: got an input placed {tuple(input.placements)} for a weight placed "
            f"{placements}, expected {expected}; redistribute it"
        )
    group, to, tokens = mesh.get_group(0).group_name, last, None
    reduce = None if scales_known else reduction((group,))
    if by_rows:
        x = input.to_local(grad_placements=(placement.Partial(),))
        across = Across(None, reduce, reduce)
    else:
        x, to = input.to_local(), placement.Partial()
        dim, ranks = last.dim if tokens_dim is None else tokens_dim % input.dim(), mesh.size()
        if dim != last.dim:
            if x.shape[dim] % ranks:
                raise ValueError(
                    f"Float8Linear: got an input of shape {tuple(x.shape)} and an output to be "
                    f"sharded along dim {dim} over {ranks} ranks, expected that dim divisible by "
                    f"{ranks}; pad it"
                )
            tokens, to = Tokens(group, ranks, dim, math.prod(x.shape[:dim])), placement.Shard(dim)
        across = Across(reduce, reduce, reduce if tokens else None, tokens)
    here = bias.to_local() if by_rows and bias is not None else None
    y = apply_linear(x, weight.to_local(), here, plan, scales, None, keep_input, across)
    output = placement.DTensor.from_local(y, mesh, (to,), run_check=False)
    if by_rows or bias is None:
        return output
    # What the ranks' tokens say of the bias is summed in backward.
    return output + bias.redistribute(placements=bias.placements)


def require_divisible(shape: torch.Size, dim: int, ranks: int) -> None:
    """Raise a `ValueError` for a weight that ranks cannot share evenly."""
    if shape[dim] % ranks:
        raise ValueError(
            f"Float8Linear: got a weight of shape {tuple(shape)}, to be sharded along dim {dim} "
            f"over {ranks} ranks, expected that dim divisible by {ranks}"
        )
