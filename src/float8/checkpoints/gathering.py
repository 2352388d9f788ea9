"""Weights of which ranks hold parts: each rank casts its own, and bytes are gathered."""

from typing import Any

import torch
from torch import Tensor

from float8.checkpoints.layouts import Layout
from float8.config import Granularity
from float8.formats import FLOAT8_MAX
from float8.tensor import Float8Tensor, is_dtensor
from float8.tensor.ranks import ranks_of_dims, sharding_groups


def parts_have_own_scales(weight: Any, granularity: Granularity) -> bool:
    """Whether no scale of a DTensor [N, K] covers parts of two ranks; or there is one for all."""
    if granularity.one_scale:
        return True
    for dim, ranks in ranks_of_dims(weight).items():
        size, block = weight.shape[dim], (granularity.height, granularity.width)[dim]
        if block is None:
            return False
        # Torch's chunks of chunks are whole blocks only where all are of one size.
        uneven = size % ranks and weight.device_mesh.ndim > 1
        if block > 1 and (-(-size // ranks) % block or uneven):
            return False
    return True


def has_whole_experts(weight: Any) -> bool:
    """Whether each rank has whole experts of a DTensor [E, N, K]."""
    return all(each.is_replicate() or each.is_shard(0) for each in weight.placements)


def gathered(part: Float8Tensor, weight: Any, layout: Layout) -> Float8Tensor:
    """Return the whole of a weight of which each rank has cast its part; collective.

    Sent are bytes, and scales in float32; one scale is the same number on all ranks.

    Args:
        part: this rank's, in the granularity of `layout`; may be empty.
        weight: a DTensor [N, K], for which `parts_have_own_scales`.
        layout: of the checkpoint.
    """
    shape = tuple(weight.shape)
    data, scale = layout.published(part)
    data = whole_of(data, weight, shape)
    if not layout.granularity.one_scale:
        scale = whole_of(scale, weight, layout.scale_shape(shape))
    return layout.weight(data, scale, part.dtype)


def whole_of(part: Tensor, weight: Any, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of which each rank has a part, as it has one of `weight`; collective."""
    if part.dtype in FLOAT8_MAX:  # Gloo knows no float8
        return whole_of(part.view(torch.uint8), weight, shape).view(part.dtype)
    placed = type(weight).from_local(
        part,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return whole(placed)


def whole(x: Any) -> Tensor:
    """Return a tensor of which ranks may have parts; collective if they do."""
    return x.full_tensor() if is_dtensor(x) else x  # type: ignore[no-any-return]


def sum_over_parts(x: Tensor, weight: Any) -> Tensor:
    """Return the sum of `x` over the ranks that have parts of a weight; collective if they do."""
    for group in sharding_groups(weight) if is_dtensor(weight) else ():
        x = torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)
        x = torch.ops._c10d_functional.wait_tensor(x)
    return x
