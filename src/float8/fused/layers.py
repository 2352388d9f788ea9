"""Layers in a fused function, and the input that they read: as it is, or through an RMSNorm."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.fused.reasons import why_norm_not_fused
from float8.linear import Float8Linear
from float8.linear.call import LinearCall, record
from float8.linear.functional import autocast_dtype, check_input
from float8.quantize.quantize import quantize, recast
from float8.quantize.spec import CastSpec, Operand


class FusedCall(NamedTuple):
    """The arguments of an autograd function besides tensors with gradients, which it keeps."""

    layers: tuple[LinearCall, ...]
    eps: float
    residual: bool
    need_grad_x: bool

    def for_backward(self) -> "FusedCall":
        """Leave out what only forward reads."""
        layers = [layer.for_backward() if layer.ready else layer for layer in self.layers]
        return self._replace(layers=tuple(layers))


def take_apart(
    x: Tensor,
    layers: tuple[Float8Linear, ...],
    norm: tuple[Tensor, float] | None,
    residual: bool,
) -> tuple[Tensor, tuple[Tensor, ...], FusedCall]:
    """Check `x` [..., K] as `Float8Linear.forward` does, and read each weight once.

    Returns x [M, K] in the compute dtype, and the other arguments of an autograd function.
    """
    weights: list[Any] = [layer.weight for layer in layers]  # once: they may be computed
    x = check_input(x, weights[0])
    grad = torch.is_grad_enabled()
    norm_weight, eps = norm or (None, 0.0)
    norm_needs_grad = norm_weight is not None and norm_weight.requires_grad
    bound = []
    for layer, weight in zip(layers, weights, strict=True):
        casts = layer.plan.casts
        if layer.delayed:
            layer.check_synced()
            casts = layer.casts()
        N, K = weight.shape
        bound.append(
            LinearCall(
                layer.plan, casts, layer.ready_weight(weight), None, None, K, N, weight.dtype,
                need_grad_input=True, need_grad_weight=grad and weight.requires_grad,
            )
        )  # fmt: skip
    need_grad_x = grad and (x.requires_grad or norm_needs_grad)
    call = FusedCall(tuple(bound), eps, residual, need_grad_x)
    return x.reshape(-1, x.shape[-1]), tuple(weights), call


def fused_norm(module: Any, x: Tensor, layer: Float8Linear) -> tuple[Tensor, float] | None:
    """Return the weight [K] and the eps of a norm of x before `layer`; None: it is called."""
    if why_norm_not_fused(module) is not None:
        return None
    if x.dtype != (autocast_dtype(x.device) or layer.weight.dtype):
        return None  # the norm takes x as it is, the layer casts it
    eps: Any = module.eps  # None means float32's, in which torch computes
    return module.weight, torch.finfo(torch.float32).eps if eps is None else eps


class Kept(NamedTuple):
    """The source of column data of the input, in backward: its scale, and one of three.

    Of a norm x [M, K], the weight and rstd [M]; `col`: column data; `rows`: x itself.
    """

    scale: Tensor
    x: Tensor | Any = None
    norm_weight: Tensor | Any = None
    rstd: Tensor | Any = None
    col: Tensor | None = None
    rows: Tensor | None = None


def input_operand(
    x: Tensor, norm_weight: Tensor | None, eps: float, readers: Sequence[LinearCall]
) -> tuple[Operand, Kept]:
    """Cast the input of `readers`, x [M, K] or its norm: row data, and what is kept for backward.

    Of a norm x is kept, and cast again in backward.
    """
    cast = readers[0].casts.input
    if cast.record and cast.state is not None:  # apart: the amax is that of every reader's input
        cast = cast._replace(state=cast.state.apart())
    if norm_weight is None:
        col = any(reader.need_grad_weight for reader in readers)
        rows = x.clone() if col and torch.compiler.is_compiling() else None  # as `functional`
        made = quantize(x, cast, row=True, col=col and rows is None, traced=True)
        row, col_data = made.row, None if made.col is None else made.col.data
        kept = Kept(row.scale, col=col_data, rows=rows)
    else:
        how = cast.spec, cast.state
        rstd, row = kernels.rms_norm_cast(x, norm_weight, eps, *how, record=cast.record)
        kept = Kept(row.scale, x, norm_weight, rstd)
    if cast.state is not None:
        for reader in readers:
            record(reader.casts.input, cast.state.amax)
    return row, kept


def input_columns(kept: Kept, spec: CastSpec) -> Operand:
    """Return column data of that input, in backward."""
    if kept.col is not None:
        return Operand(kept.col, kept.scale)
    if kept.rows is not None:
        return recast(kept.rows, spec, kept.scale)
    col = kernels.rms_norm_recast(kept.x, kept.norm_weight, kept.rstd, kept.scale, spec.dtype)
    return Operand(col, kept.scale)
