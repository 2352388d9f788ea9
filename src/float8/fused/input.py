"""The input of a fused function: as it is, or through an RMSNorm."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.fused.layers import Call, FusedLayer, placed, scale_of_all
from float8.fused.reasons import why_norm_not_fused
from float8.linear import Float8Linear
from float8.linear.across import Tokens
from float8.linear.functional import autocast_dtype, gathered_rows, input_in_float8
from float8.linear.weight import record_amax
from float8.quantize.quantize import padded, quantize, recast
from float8.quantize.spec import CastSpec, Part
from float8.tensor import Float8Tensor, is_dtensor, local_tensor
from float8.tensor.float8_tensor import Columns


def fused_norm(module: Any, x: Any, layer: Float8Linear) -> tuple[Any, Tensor, float] | None:
    """What a fused function takes of x and of a norm before `layer`.

    Returns x, `placed` under tensor parallel, and the weight [K] and the eps of the norm. None
    where the norm is called by itself: under tensor parallel also where a rank has parts of rows
    of x, or not as many as others.
    """
    if why_norm_not_fused(module) is not None:
        return None
    taken, weight = placed(x, module, layer), module.weight
    if is_dtensor(taken):
        weight = _weight_on_mesh(weight, x, taken, layer)
    elif is_dtensor(weight):
        return None
    dtype = autocast_dtype(x.device) or layer.weight.dtype
    if weight is None or x.dtype != dtype or isinstance(local_tensor(taken), Float8Tensor):
        return None  # the norm takes x as it is, the layer casts it
    eps: Any = module.eps  # None means float32's, in which torch computes
    return taken, weight, torch.finfo(torch.float32).eps if eps is None else eps


def _weight_on_mesh(weight: Any, x: Any, on_mesh: Any, layer: Any) -> Tensor | None:
    """The weight of a norm as a plain tensor, or None where it is not fused."""
    mesh = on_mesh.device_mesh
    if mesh != layer.weight.device_mesh:
        return None
    (placement,) = on_mesh.placements
    if not placement.is_replicate():
        tokens = placement.is_shard() and placement.dim % on_mesh.dim() != on_mesh.dim() - 1
        if not tokens or layer.gathered != "input" or on_mesh.shape[placement.dim] % mesh.size():
            return None
    if not is_dtensor(weight):
        # Of DTensors and others torch says what it thinks.
        return None if is_dtensor(x) else weight
    if weight.device_mesh != mesh:
        return None
    if placement.is_replicate():
        return weight.to_local()  # type: ignore[no-any-return]
    # What the ranks' tokens say of it is summed in backward.
    of_parts = (torch.distributed.tensor.Partial(),)
    weight = weight.redistribute(placements=weight.placements)
    return weight.to_local(grad_placements=of_parts)  # type: ignore[no-any-return]


class Kept(NamedTuple):
    """What backward makes column data of the input from: its scale, and one of three.

    Of a norm x [M, K], the weight and rstd [M]; `col`: column data; `rows`: x itself, or row data.
    """

    scale: Tensor
    x: Tensor | Any = None
    norm_weight: Tensor | Any = None
    rstd: Tensor | Any = None
    col: Tensor | None = None
    rows: Tensor | None = None


def input_operand(
    x: Tensor, norm_weight: Tensor | None, call: Call, readers: tuple[FusedLayer, ...]
) -> tuple[Part, Kept]:
    """The input of `readers`, x [M, K] or its norm: row data, and what is kept for backward.

    Of a norm x is kept, and cast again in backward; or the row data, if those were gathered.
    """
    first, record = readers[0], call.record
    spec, state = first.plan.input, first.scales.input
    col = any(reader.need_grad_weight for reader in readers)
    if norm_weight is None and isinstance(x, Float8Tensor):
        operand = input_in_float8(x, first.plan)
        for reader in readers:
            record_amax(reader.scales.input if record else None, operand.amax)
        return operand.row, Kept(operand.row.scale, rows=x._data if col else None)
    if record and state is not None:  # apart: the amax is that of every reader's input
        state = state.apart()
    if norm_weight is None:
        rows = x.clone() if col and torch.compiler.is_compiling() else None  # as `functional`
        made = quantize(
            x, spec, row=True, col=col and rows is None, state=state, record=record, fuse_amax=True
        )
        row = made.row
        kept = Kept(row.scale, col=None if made.col is None else made.col.data, rows=rows)
    else:
        rstd, row = kernels.rms_norm_cast(x, norm_weight, call.eps, spec, state, record=record)
        rows = None
        if isinstance(call.everyone, Tokens):
            if first.across.input is not None:
                whole = scale_of_all(row.scale, first.across.input)
                _, row = kernels.rms_norm_cast(x, norm_weight, call.eps, spec, whole)
            row = gathered_rows(row, spec, call.everyone, x.shape[1])
            rows = row.data if col else None
            row = padded(row, spec, pad_rows=False)
        kept = Kept(row.scale, x, norm_weight, rstd, rows=rows)
    for reader in readers:
        if record and state is not None:
            record_amax(reader.scales.input, state.amax)
    return row, kept


def input_columns(kept: Kept, spec: CastSpec, made: Columns | None) -> Part:
    """Column data of that input, in backward; `made`: those that all readers of x share."""
    if kept.col is not None:
        return Part(kept.col, kept.scale)
    if kept.rows is not None:
        if made is not None:
            return made.of(Part(kept.rows, kept.scale), spec)
        return recast(kept.rows, spec, kept.scale)
    col = kernels.rms_norm_recast(kept.x, kept.norm_weight, kept.rstd, kept.scale, spec.dtype)
    return Part(col, kept.scale)


def norm_gradients(
    grads: Sequence[Tensor], kept: Kept, call: Call, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the norm's weight, of those [M, K] of the norm's readers."""
    if call.everyone is not None:  # who have summands
        grads = [call.everyone.scatter(functools.reduce(torch.add, grads))]
    return kernels.rms_norm_backward(grads, kept.x, kept.norm_weight, kept.rstd, residual_grad)
