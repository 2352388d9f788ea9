"""The weight of a layer as an operand: cast in this call, or in float8 already.

Backward needs it transposed. It is made from what forward saved: the high-precision weight, cast
again straight to that layout; or float8 data that somebody keeps anyway (a gathered weight, a
held one), of which the transposed copy is an exact transpose of bytes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.config import ScalingGranularity
from float8.formats import FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.linear.across import Across
from float8.linear.held import HeldPart
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
) -> Part | HeldPart:
    """Row data of `weight` [N, K] for the output GEMM: those that are `ready`, or cast now."""
    if ready is None:
        return quantize(
            weight, spec, row=True, pad_rows=True, state=state, record=record,
            scale=across.weight_scale, reduce=across.weight, fuse_amax=state is not None,
        ).row  # fmt: skip
    if record:
        record_amax(state, ready.amax)
    if _compares(ready):
        of = None if state is None else state.scale
        data, scale = ready.row
        return HeldPart(data, scale, weight.detach(), of, spec, is_transposed=False)
    return padded(ready.row, spec)


def _compares(ready: Quantized) -> bool:
    """Whether it is for the GEMMs to see if `ready` is current: in compiled code, if it is held."""
    return ready.col is not None and torch.compiler.is_compiling()


def in_float8_only(weight: Tensor, spec: CastSpec) -> Float8Tensor:
    """`weight` [N, K] as a tensor that has no high-precision values, cast by `spec`."""
    made = quantize(weight, spec, row=True).row
    data = made.data[: weight.shape[0], : weight.shape[1]].contiguous()
    return Float8Tensor(data, made.scale, weight.dtype, spec.granularity)


def moved(weight: Float8Tensor, fn: Callable[[Tensor], Tensor]) -> Float8Tensor:
    """`weight` after `fn`, as `nn.Module._apply` takes it; a change of dtype is of what it reports.

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


def record_amax(state: DelayedScale | None, amax: Tensor | None) -> None:
    """Let delayed scaling, if it is that, learn of a tensor that was cast elsewhere."""
    if state is not None and amax is not None:
        state.record(amax)


class KeptWeight(NamedTuple):
    """A weight as forward saves it for `weight_columns`."""

    data: Tensor | Any
    """The weight itself, or its float8 data; None: backward has no use for it."""

    beside: Tensor | None
    """The weight beside its held data, where the GEMMs of compiled code compare the two. As ever
    autograd tells then if it is written before backward."""

    scale: Tensor | Any
    """Of the float8 data, or of those that forward used; None: it used none."""


def kept_weight(weight: Tensor, ready: Quantized | None, scale: Tensor | None) -> KeptWeight:
    """Choose what forward saves: nothing that it would have to make.

    `scale`: of the row data that forward used.
    """
    if ready is None:
        return KeptWeight(weight, None, scale)
    if ready.col is None:
        return KeptWeight(ready.row.data, None, scale)
    return KeptWeight(ready.col.data, weight if _compares(ready) else None, ready.col.scale)


def weight_columns(
    kept: KeptWeight,
    spec: CastSpec,
    state: DelayedScale | None,
    is_transposed: bool,
    after: Tensor,
) -> Part | HeldPart:
    """Column data of the weight, [K, N], for the GEMM grad_input.

    Args:
        kept: by `kept_weight`.
        spec: of the weight's cast.
        state: of the weight's cast.
        is_transposed: whether the kept data are column data.
        after: made of a gradient. A compiler that saw no need for one would transpose in forward
            and keep the result until backward, under FSDP that of every whole weight.
    """
    data, beside, scale = kept
    if beside is not None:
        of = None if state is None else state.scale
        return HeldPart(data, scale, beside.detach(), of, spec, is_transposed=True)
    if is_transposed:
        return Part(data, scale)
    if data.dtype in FLOAT8_MAX:
        return columns(Part(data, scale), spec, after)
    known = scale if spec.granularity is ScalingGranularity.TENSORWISE else None
    return quantize(data, spec, col=True, scale=known, after=after).col
