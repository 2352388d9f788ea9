"""The input of a fused function: as it is, or through an RMSNorm."""

from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.fused.layers import Call, FusedLayer, has_hooks
from float8.linear import Float8Linear
from float8.linear.held import PLAIN
from float8.quantize.quantize import quantize
from float8.quantize.spec import Part


def fused_norm(
    module: nn.Module | None, x: Tensor, layer: Float8Linear
) -> tuple[Tensor | None, float]:
    """The weight [K] and the eps of a norm before `layer`; None where it is called by itself.

    Fused are `nn.RMSNorm`, and modules that say with an attribute `is_rms_norm = True` that they
    compute `x * rsqrt(mean(x ** 2) + eps) * weight` in float32: others that have a weight and an
    eps may compute something else.
    """
    if module is None or has_hooks(module) or "forward" in module.__dict__:
        return None, 0.0
    if type(module) is not nn.RMSNorm and not getattr(module, "is_rms_norm", False):
        return None, 0.0
    weight: Any = module.weight
    if type(weight) not in PLAIN or weight.dim() != 1 or weight.shape[0] > kernels.WIDEST_NORM:
        return None, 0.0
    device, dtype = x.device.type, layer.weight.dtype
    if device != "meta" and torch.is_autocast_enabled(device):  # meta knows no autocast
        dtype = torch.get_autocast_dtype(device)
    if x.dtype != dtype:  # the norm takes x as it is, the layer casts it
        return None, 0.0
    eps: Any = module.eps  # None means float32's, in which torch computes
    return weight, torch.finfo(torch.float32).eps if eps is None else eps


def input_operand(
    x: Tensor, norm_weight: Tensor | None, call: Call, readers: tuple[FusedLayer, ...], col: bool
) -> tuple[Part, Tensor | None, Tensor | None]:
    """The input of `readers`, x [M, K] or its norm: row data, column data if asked for, rstd [M].

    Of a norm there are no column data: backward makes them by `rms_norm_recast`.
    """
    spec, state, record = readers[0].plan.input, readers[0].scales.input, call.record
    if record and state is not None:  # apart: the amax is that of every reader's input
        state = state._replace(amax=torch.zeros_like(state.amax))
    if norm_weight is None:
        made = quantize(x, spec, row=True, col=col, state=state, record=record, fuse_amax=True)
        row, columns, rstd = made.row, None if made.col is None else made.col.data, None
        assert row is not None
    else:
        columns = None
        rstd, row = kernels.rms_norm_cast(x, norm_weight, call.eps, spec, state, record=record)
    for reader in readers:
        own = reader.scales.input
        if record and state is not None and own is not None:
            own.amax.copy_(torch.maximum(own.amax, state.amax))
    return row, columns, rstd
