"""The weight of a layer as a GEMM operand: cast in this call, or in float8 already.

Backward needs it transposed. It is made from what forward saved: the high-precision weight, cast
again straight to that layout; or float8 data that somebody keeps anyway (a gathered weight, a
cached one), of which the transposed copy is an exact transpose of bytes.
"""

import torch
from torch import Tensor

from float8.cast import CastPlan, Operand, cast_operand, columns, padded, quantize
from float8.formats import FLOAT8_MAX
from float8.scaling import DelayedScale
from float8.tensor import Float8Tensor


def float8_operand(weight: Tensor) -> Operand | None:
    """The operand of a weight that is in float8 already, else None; no bytes are copied."""
    if not isinstance(weight, Float8Tensor):
        return None
    return Operand(weight._data, None, weight._scale, weight._amax)


def weight_operand(
    weight: Tensor,
    ready: Operand | None,
    plan: CastPlan,
    state: DelayedScale | None,
    record: bool,
) -> Operand:
    """Row data of `weight` [N, K] for the output GEMM: those that are `ready`, or cast now."""
    if ready is None:
        return quantize(weight, plan, state, row=True, pad_rows=True, record=record)
    if record and state is not None and ready.amax is not None:
        state.amax.copy_(torch.maximum(state.amax, ready.amax))
    assert ready.row is not None
    return ready._replace(row=padded(ready.row))


def saved_weight(weight: Tensor, ready: Operand | None) -> Tensor:
    """What forward saves for `transposed_weight`: nothing that it would have to make."""
    if ready is None:
        return weight
    saved = ready.row if ready.col is None else ready.col
    assert saved is not None
    return saved


def transposed_weight(
    saved: Tensor, scale: Tensor, plan: CastPlan, is_transposed: bool, after: Tensor
) -> Operand:
    """The operand of the transposed weight [K, N], for the GEMM grad_input.

    Args:
        saved: by `saved_weight`.
        scale: of the operand that forward used.
        plan: of the weight's cast.
        is_transposed: whether `saved` is column data.
        after: made of a gradient. A compiler that saw no need for one would transpose in forward
            and keep the result until backward, under FSDP that of every whole weight.
    """
    if is_transposed:
        return Operand(saved, None, scale)
    if saved.dtype in FLOAT8_MAX:
        return Operand(columns(saved, after), None, scale)
    return Operand(cast_operand(saved, scale, plan.dtype, col=True, after=after).col, None, scale)
