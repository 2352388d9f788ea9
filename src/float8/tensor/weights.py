"""Put weights into tensor subclasses and take them out; quantize weights to `Float8Tensor`s."""

from typing import Any

import torch
from torch import Tensor, nn

from float8.config import CastSite, Float8LinearConfig, Float8Weights, ScalingGranularity
from float8.products import PRODUCTS
from float8.quantize import Cast
from float8.tensor.float8_tensor import Float8Tensor
from float8.tensor.ranks import dtensor_like, local_tensor


@torch.inference_mode(False)  # inference tensors have no version counters
def high_precision(x: Tensor) -> Tensor:
    """Return the high-precision tensor in `x`, a weight wrapped for FSDP2's all-gather in float8.

    The result is detached, and a DTensor if `x` is one. It shares memory with `x`: when eager code
    writes to it, a float8 cast kept for `x` becomes invalid. Other tensors, also a `Float8Tensor`,
    are returned unchanged: nothing is dequantized.
    """
    local = local_tensor(x)
    if (plain := getattr(local, "high_precision", None)) is None:  # no `Float8GatherWeight`
        return x
    if local is x:
        return plain.detach()  # type: ignore[no-any-return]
    new: Any = x.detach()
    new._local_tensor = plain.detach()
    return new  # type: ignore[no-any-return]


def wrapped_like(new: Any, old: Tensor | None) -> nn.Parameter:
    """Return Parameter `new`; if it replaces an `old` wrapped for float8 gathers, wrap it, too."""
    template, values = local_tensor(old), local_tensor(new)
    if not hasattr(template, "high_precision") or hasattr(values, "high_precision"):
        return new  # type: ignore[no-any-return]
    tensor = template.wrap(values.detach())
    if values is not new:
        with torch.no_grad():
            tensor = dtensor_like(tensor, new)
    return nn.Parameter(tensor, requires_grad=new.requires_grad)


def require_one_cast(config: Float8LinearConfig, name: str) -> None:
    """Raise `ValueError` if `config` sets field `name`, but GEMMs cannot share a cast of a weight.

    Output and grad_input must need the same float8 cast. Unless the value is `Float8Weights.HELD`
    (casts are kept), column data (the transposed copy) must be computable from float8 data: under
    `TENSORWISE`, squares, or `AXISWISE` or (if FSDP2 gathers none) 1 x 32 with powers of two.
    """
    value, default = getattr(config, name), getattr(Float8LinearConfig, name)
    if value == default:
        return
    cast, other = map(config.cast_config, (CastSite.WEIGHT, CastSite.WEIGHT_FOR_GRAD_INPUT))
    if other != cast or not cast.is_float8:
        raise ValueError(
            f"{name}: got {value} with a weight that is {cast.short_str()} for output and "
            f"{other.short_str()} for grad_input, expected one cast in float8 for both; set it "
            f"to {default}, or configure both alike"
        )
    granularity = cast.scaling_granularity
    # Squares, as TENSORWISE, are transposed; others cast again, almost exactly by powers of 2.
    ungathered_mx = granularity.exponents and not config.enable_fsdp_float8_all_gather
    exact = granularity.square or (cast.power_of_2 and (granularity.by_rows or ungathered_mx))
    if value is not Float8Weights.HELD and not exact:  # HELD casts both from high precision
        raise ValueError(
            f"{name}: got {value} with a weight under {granularity}, expected TENSORWISE, a "
            f"square BLOCK, or AXISWISE with round_scales_to_power_of_2, as column data for "
            f"grad_input are made from its float8 data; set it to {default}, or change these"
        )


@torch.inference_mode(False)  # an inference tensor could not be saved for a backward
@torch.no_grad()
def in_float8_only(weight: Tensor, cast: Cast) -> Float8Tensor:
    """Return `weight`, [N, K] or [E, N, K], quantized by `cast`; if a `Float8Tensor`, unchanged."""
    if isinstance(weight, Float8Tensor):
        return weight
    padded, scale = PRODUCTS[weight.dim()].quantize_weight(weight, cast, row=True).row
    *_, N, K = weight.shape
    granularity, data = cast.config.scaling_granularity, padded[..., :N, :K]
    if weight.dim() == 3 and granularity.width is None:  # scales [E, N], also under TENSORWISE
        scale, granularity = scale.unsqueeze(-1), ScalingGranularity.AXISWISE
    if not granularity.one_scale:  # drop scales of padding
        *_, rows, columns = granularity.scales(tuple(weight.shape))
        scale = scale[..., :rows, :columns].contiguous()
    if data.shape != padded.shape:  # a view would keep the padding alive
        data = data.clone(memory_format=torch.contiguous_format)
    return Float8Tensor(data, scale, weight.dtype, granularity)
