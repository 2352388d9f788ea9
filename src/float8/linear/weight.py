"""Weights that are in float8 only: made of high-precision ones, and moved."""

from collections.abc import Callable

import torch
from torch import Tensor

from float8.formats import FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.quantize import Cast, quantize
from float8.tensor import Float8Tensor


@torch.inference_mode(False)  # else it could not be saved for a backward
@torch.no_grad()
def in_float8_only(weight: Tensor, cast: Cast) -> Float8Tensor:
    """Return `weight` [N, K] as a tensor that has no high-precision values; itself if it is one."""
    if isinstance(weight, Float8Tensor):
        return weight
    made = quantize(weight, cast, row=True).row
    data = made.data[: weight.shape[0], : weight.shape[1]].contiguous()
    return Float8Tensor(data, made.scale, weight.dtype, cast.how.scaling_granularity)


def moved(weight: Float8Tensor, fn: Callable[[Tensor], Tensor]) -> Float8Tensor:
    """Apply `fn`, as `nn.Module._apply` takes it; a change of dtype is of what a weight reports.

    `fn` is given bits, which it moves, pins, shares or leaves uninitialised as it does those of
    any tensor.
    """
    like = fn(torch.empty((), dtype=weight.dtype, device=weight.device))
    if like.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"Float8Linear: got {like.dtype} for a weight that is in float8 only, expected one of "
            f"{', '.join(map(str, HIGH_PRECISION_DTYPES))}; call convert_to_high_precision(model) "
            f"first"
        )

    def move(x: Tensor) -> Tensor:
        bits = torch.uint8 if x.dtype in FLOAT8_MAX else torch.int32
        made = fn(x.view(bits))
        # Some change the dtype of integers, too.
        return made.view(x.dtype) if made.dtype == bits else x.to(like.device)

    data, scale = move(weight._data), move(weight._scale)
    return Float8Tensor(data, scale, like.dtype, weight._granularity)
