"""Weights in wrappers: with a high-precision tensor inside, or in float8 only."""

from typing import Any

import torch
from torch import Tensor, nn

from float8.tensor.float8_tensor import in_float8_only as in_float8_only
from float8.tensor.ranks import dtensor_like, local_tensor


# Tensors that are made in inference mode have no version counters.
@torch.inference_mode(False)
def high_precision(x: Tensor) -> Tensor:
    """Return the plain tensor that a wrapper, or a DTensor of it, holds; other tensors unchanged.

    It shares memory and version counter with the wrapper.
    """
    local = local_tensor(x)
    if (plain := getattr(local, "high_precision", None)) is None:
        return x
    if local is x:
        return plain.detach()  # type: ignore[no-any-return]
    new: Any = x.detach()
    new._local_tensor = plain.detach()
    return new  # type: ignore[no-any-return]


def wrapped_like(new: Any, old: Tensor | None) -> nn.Parameter:
    """Return `new` as a Parameter in a wrapper as that of `old`; unchanged if `old` has none."""
    template, values = local_tensor(old), local_tensor(new)
    if not hasattr(template, "high_precision") or hasattr(values, "high_precision"):
        return new  # type: ignore[no-any-return]
    tensor = template.wrap(values.detach())
    if values is not new:
        with torch.no_grad():
            tensor = dtensor_like(tensor, new)
    return nn.Parameter(tensor, requires_grad=new.requires_grad)
