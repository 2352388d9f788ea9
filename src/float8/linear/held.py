"""The float8 data of a weight, held beside the weight from one optimizer step to the next.

`update_float8_weights` casts each weight once, to both layouts in one read; forwards, backwards,
recomputation and microbatches of training read that. What was cast carries a stamp: the version
counter of the weight, its memory and its address, and those of the scale under delayed scaling.
Each use compares, and casts again what does not match. Eager code does so in Python. Compiled code,
which Python does not follow, does so in an op: to the compiler it returns the scales, so that
whatever reads the data waits for it.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from float8.config import ScalingGranularity
from float8.kernels.runtime.ops import register
from float8.quantize.history import DelayedScale
from float8.quantize.quantize import quantize
from float8.quantize.spec import CastSpec, Part, Quantized

PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
"""Weights that are data in memory and nothing else: no shards, no wrappers."""


_DYNAMO_TELLS = TorchVersion(torch.__version__) >= "2.13"
"""Whether Dynamo knows export from compilation: that of torch 2.11 takes all for export."""


class HeldWeight(NamedTuple):
    """What a layer holds: its weight, and that in float8."""

    weight: nn.Parameter
    operand: Quantized


@torch.inference_mode(False)  # else it could not be saved for a backward
@torch.no_grad()
def hold(weight: Tensor, spec: CastSpec, scale: Tensor | None) -> Quantized:
    """Cast `weight` [N, K] to both layouts in one read, and stamp the result.

    Args:
        weight: float32, bfloat16 or float16.
        spec: of the cast.
        scale: the buffer of delayed scaling with the scale to use, or None. Nothing is recorded
            yet: the operand carries its amax, for each forward to record that would have cast.
    """
    state = None if scale is None else DelayedScale(scale, torch.zeros_like(scale))
    made = quantize(weight, spec, row=True, col=True, pad_rows=True, state=state, record=True)
    made.row.data.__dict__["float8_made_of"] = _stamp(weight, scale)
    return made._replace(amax=None if state is None else state.amax)


def is_current(data: Tensor, weight: Tensor, scale: Tensor | None) -> bool:
    """Whether row data of `hold` are those of `weight` and `scale` as they are now.

    As far as version counters tell: they count what ops write, and not what fused optimizers do,
    nor what goes through `weight.data` or a raw pointer.
    """
    return data.__dict__.get("float8_made_of") == _stamp(weight, scale)


def _stamp(*tensors: Tensor | None) -> tuple[Any, ...]:
    # The memory, too: what is freed and allocated anew may have the same address.
    return tuple(
        None if x is None else (x._version, x.data_ptr(), weakref.ref(x.untyped_storage()))
        for x in tensors
    )


def can_hold(weight: Any) -> bool:
    """Whether `weight` is one whose writes are counted, and which is all of a weight."""
    return type(weight) is nn.Parameter and not weight.is_meta and not weight.is_inference()


def current(held: HeldWeight, spec: CastSpec, scale: Tensor | None) -> HeldWeight | None:
    """`held`, cast again if its weight was written; None if a recording must not keep it."""
    weight, operand = held
    exporting = torch.compiler.is_exporting()
    if exporting and (_DYNAMO_TELLS or not torch.compiler.is_dynamo_compiling()):
        return None  # or the program would hold the data, too
    if torch.compiler.is_compiling():
        return HeldWeight(weight, _traced(weight, operand, spec, scale))
    if _is_recording(weight):
        return None
    if is_current(operand.row.data, weight, scale):
        return held
    # Not where the old one lies, which a backward still to come may read.
    return HeldWeight(weight, hold(weight, spec, scale))


def _is_recording(weight: Tensor) -> bool:
    """Whether operations go into a graph, which would keep the data for ever."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # slow to import

    if get_proxy_mode() is not None:
        return True
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


# ---------------------------------------------------------------- in compiled code


def _traced(weight: Tensor, operand: Quantized, spec: CastSpec, scale: Tensor | None) -> Quantized:
    data, small = _flat(operand, spec)
    kind = spec.dtype, spec.granularity.value, spec.power_of_2
    small = torch.ops.float8.held_weight.default(weight, data, small, scale, *kind)
    scales, amax = (small, None) if operand.amax is None else (small[:-1], small[-1])
    return Quantized(Part(data[0], scales[0]), Part(data[1], scales[-1]), amax)


def _flat(operand: Quantized, spec: CastSpec) -> tuple[list[Tensor], list[Tensor]]:
    """Row and column data; the scales of both, or the one of both, then the amax, if any."""
    row, col, amax = operand
    one_scale = spec.granularity is ScalingGranularity.TENSORWISE
    scales = [row.scale] if one_scale else [row.scale, col.scale]
    return [row.data, col.data], scales if amax is None else [*scales, amax]


def held_weight(
    weight: Tensor,
    data: list[Tensor],
    small: list[Tensor],
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_2: bool,
) -> list[Tensor]:
    """Make what is held of `weight` current, in place, and return copies of what is `small`.

    A compiler is not told of the writes: to it the data are what the weight is in float8, before
    and after. A CUDA graph, which is replayed without this code, records the cast itself.

    Args:
        weight: [N, K].
        data: as `_flat` lists them, as is what follows.
        small: see there.
        scale: as for `hold`.
        dtype: of the data.
        granularity: the value of a `ScalingGranularity`.
        power_of_2: whether scales are rounded up to powers of two.
    """
    recording = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    if recording or not is_current(data[0], weight, scale):
        spec = CastSpec(dtype, ScalingGranularity(granularity), power_of_2=power_of_2)
        new_data, new_small = _flat(hold(weight, spec, scale), spec)
        old = [*data, *small]
        for target, source in zip(old, [*new_data, *new_small], strict=True):
            target.copy_(source)
        torch.autograd.graph.increment_version(old)  # a backward still to come shall notice
        data[0].__dict__["float8_made_of"] = None if recording else _stamp(weight, scale)
    return [x.clone() for x in small]


def _held_weight_fake(
    weight: Tensor, data: list[Tensor], small: list[Tensor], *rest: Any
) -> list[Tensor]:
    return [torch.empty_like(x) for x in small]


register("held_weight", held_weight, triton=held_weight, fake=_held_weight_fake)
