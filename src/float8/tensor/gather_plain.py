"""Weights without the plan of their gather, as state dicts hold them, and with it again."""

from typing import Any

import torch
from torch import Tensor, nn

from float8.tensor.dtensor import dtensor_like, local_tensor
from float8.tensor.gather_weight import Float8GatherWeight


# Version counters, which tell of writes, are there outside of inference mode only.
@torch.inference_mode(False)
def high_precision(x: Tensor) -> Tensor:
    """`x` without the plan of its gather, sharing its memory; a DTensor stays one.

    Writes through the result forget the precomputed scale of the weight, except those that hide
    from version counters: through `.data`, NumPy or a raw pointer, `torch._foreach_*` of DTensors.
    """
    local = local_tensor(x)
    if not isinstance(local, Float8GatherWeight):
        return x
    inner = local.high_precision
    if inner.is_inference():  # it has no version counter
        return inner.detach() if x is local else dtensor_like(x, inner.detach())
    spec: Any = None if x is local else (x.device_mesh, x.placements, x.shape)  # type: ignore[attr-defined]
    key = (spec, inner.shape, inner.stride(), inner.storage_offset())
    return local.shared.alias(
        key, lambda: inner.detach() if x is local else dtensor_like(x, inner.detach())
    )


def with_plan_of(new: nn.Parameter, old: Tensor | None) -> nn.Parameter:
    """`new` as a weight that is gathered as `old`, which it replaces; itself if that is plain."""
    model, values = local_tensor(old), local_tensor(new)
    if not isinstance(model, Float8GatherWeight) or isinstance(values, Float8GatherWeight):
        return new
    wrapped = type(model)(values.detach(), model.plan)
    with torch.no_grad():
        tensor = wrapped if values is new else dtensor_like(new, wrapped)
    return nn.Parameter(tensor, requires_grad=new.requires_grad)
