"""The weight of a layer as an operand: cast in this call, or in float8 already.

Backward needs it transposed. It is made from what forward saved: the high-precision weight, cast
again straight to that layout; or float8 data that somebody keeps anyway (a gathered weight, a
held one), of which the transposed copy is an exact transpose of bytes.
"""

import torch
from torch import Tensor

from float8.config import ScalingGranularity
from float8.formats import FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.linear.across import Across
from float8.quantize.history import DelayedScale
from float8.quantize.quantize import columns, padded, quantize
from float8.quantize.spec import CastSpec, Part, Quantized
from float8.tensor import Float8Tensor


def weight_rows(
    weight: Tensor,
    ready: Quantized | None,
    spec: CastSpec,
    state: DelayedScale | None,
    record: bool,
    across: Across,
) -> Part:
    """Row data of `weight` [N, K] for the output GEMM: those that are `ready`, or cast now."""
    if ready is None:
        return quantize(
            weight, spec, row=True, pad_rows=True, state=state, record=record,
            scale=across.weight_scale, reduce=across.weight, fuse_amax=state is not None,
        ).row  # fmt: skip
    if record:
        record_amax(state, ready.amax)
    return padded(ready.row, spec)


def in_float8_only(weight: Tensor, spec: CastSpec) -> Float8Tensor:
    """`weight` [N, K] as a tensor that has no high-precision values, cast by `spec`."""
    made = quantize(weight, spec, row=True).row
    data = made.data[: weight.shape[0], : weight.shape[1]].contiguous()
    return Float8Tensor(data, made.scale, weight.dtype, spec.granularity)


def moved(weight: Float8Tensor, like: Tensor) -> Float8Tensor:
    """`weight` on the device of `like`, and reporting its dtype; uninitialised if it was meta."""
    if like.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"Float8Linear: got {like.dtype} for a weight that is in float8 only, expected one of "
            f"{', '.join(map(str, HIGH_PRECISION_DTYPES))}; call convert_to_high_precision(model) "
            f"first"
        )

    def move(x: Tensor) -> Tensor:
        return torch.empty_like(x, device=like.device) if x.is_meta else x.to(like.device)

    data, scale = move(weight._data), move(weight._scale)
    return Float8Tensor(data, scale, like.dtype, weight._granularity)


def record_amax(state: DelayedScale | None, amax: Tensor | None) -> None:
    """Let delayed scaling, if it is that, learn of a tensor that was cast elsewhere."""
    if state is not None and amax is not None:
        state.amax.copy_(torch.maximum(state.amax, amax))


def kept_weight(weight: Tensor, ready: Quantized | None) -> Tensor:
    """What forward saves for `weight_columns`: nothing that it would have to make."""
    if ready is None:
        return weight
    return (ready.row if ready.col is None else ready.col).data


def weight_columns(
    kept: Tensor, scale: Tensor, spec: CastSpec, is_transposed: bool, after: Tensor
) -> Part:
    """Column data of the weight, [K, N], for the GEMM grad_input.

    Args:
        kept: by `kept_weight`.
        scale: of the row data that forward used.
        spec: of the weight's cast.
        is_transposed: whether `kept` is column data.
        after: made of a gradient. A compiler that saw no need for one would transpose in forward
            and keep the result until backward, under FSDP that of every whole weight.
    """
    if is_transposed:
        return Part(kept, scale)
    if kept.dtype in FLOAT8_MAX:
        return columns(Part(kept, scale), spec, after)
    known = scale if spec.granularity is ScalingGranularity.TENSORWISE else None
    return quantize(kept, spec, col=True, scale=known, after=after).col
