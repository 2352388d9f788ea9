"""The float8 data of a weight, held beside the weight from one optimizer step to the next.

`update_float8_weights` casts each weight once, to both layouts in one read; forwards, backwards,
recomputation and microbatches of training read that. Of a weight that ranks share, each holds its
part, under the scale of the whole. What was cast carries a stamp: the version counter of the
weight, its memory and its address, and those of the scale under delayed scaling. Each use compares,
and casts again what does not match. Eager code does so in Python. Compiled code, which Python does
not follow, does so in an op: to the compiler it returns the scales, so that whatever reads the data
waits for it.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from float8.config import ScalingGranularity
from float8.kernels.runtime.ops import register
from float8.linear.across import reduction
from float8.quantize.history import DelayedScale
from float8.quantize.quantize import quantize, scales_of
from float8.quantize.spec import CastSpec, Part, Quantized
from float8.tensor import local_tensor

PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
"""Weights that are data in memory and nothing else: no shards, no wrappers."""


_DYNAMO_TELLS = TorchVersion(torch.__version__) >= "2.13"
"""Whether Dynamo knows export from compilation: that of torch 2.11 takes all for export."""


class ToHold(NamedTuple):
    """A weight, and how it is cast."""

    weight: Tensor
    """[N, K] float32, bfloat16 or float16; or a DTensor, of which this rank's part is cast."""

    spec: CastSpec
    scale: Tensor | None
    """The buffer of delayed scaling with the scale to use, or None."""

    group: str | None
    """Of the ranks that must be asked for the amax of the whole weight, or None."""


class HeldWeight(NamedTuple):
    """What a layer holds: its weight, and that in float8."""

    weight: Tensor
    operand: Quantized


@torch.inference_mode(False)
@torch.no_grad()
def dynamic_scales(weights: Sequence[ToHold]) -> list[Tensor | None]:
    """The scales for `hold`, found in a few kernels and an all-reduce; None where it finds them."""
    alike: dict[Any, list[int]] = {}
    for index, (weight, spec, _, group) in enumerate(weights):
        if spec.granularity is ScalingGranularity.TENSORWISE and not spec.delayed:
            key = weight.device, weight.dtype, spec, group
            alike.setdefault(key, []).append(index)
    found: list[Tensor | None] = [None] * len(weights)
    for (_, dtype, spec, group), indices in alike.items():
        tensors = [local_tensor(weights[index].weight) for index in indices]
        reduce = None if group is None else reduction((group,))
        for index, scale in zip(indices, scales_of(tensors, spec, dtype, reduce), strict=True):
            found[index] = scale
    return found


@torch.inference_mode(False)  # else it could not be saved for a backward
@torch.no_grad()
def hold(of: ToHold, found: Tensor | None = None) -> Quantized:
    """Cast a weight to both layouts in one read, and stamp the result.

    Under delayed scaling nothing is recorded yet: the operand carries its amax, for each forward to
    record that would have cast. `found`: the scale, where it is dynamic and known.
    """
    state = None if of.scale is None else DelayedScale(of.scale, torch.zeros_like(of.scale))
    made = quantize(
        local_tensor(of.weight), of.spec, row=True, col=True, pad_rows=True, state=state,
        record=True, scale=found, reduce=None if of.group is None else reduction((of.group,)),
    )  # fmt: skip
    made.row.data.__dict__[_MADE_OF] = of.weight, _stamp(of.weight, of.scale)
    return made._replace(amax=None if state is None else state.amax)


_MADE_OF = "float8_made_of"
"""An attribute of row data: the weight, and its stamp when it was cast."""


def _stamp(weight: Tensor, scale: Tensor | None) -> tuple[Any, ...]:
    """What changes when a weight or its scale does, as far as version counters tell.

    They count what ops write, and not what fused optimizers do, nor what goes through `weight.data`
    or a raw pointer. Of a DTensor some writes count here, others at its local tensor, and those of
    ops that take lists, or into what was detached, nowhere.
    """
    # The memory, too: what is freed and allocated anew may have the same address.
    return weight._version, *(
        None if x is None else (x._version, x.data_ptr(), weakref.ref(x.untyped_storage()))
        for x in (local_tensor(weight), scale)
    )


def expire(held: HeldWeight) -> None:
    """Have the next use cast the weight again."""
    held.operand.row.data.__dict__[_MADE_OF] = held.weight, None


def can_hold(weight: Any) -> bool:
    """Whether `weight`, or this rank's part of it, is data in memory with a version counter."""
    plain = isinstance(weight, nn.Parameter) and type(local_tensor(weight)) in PLAIN
    return plain and not weight.is_meta and not weight.is_inference()


def current(operand: Quantized, of: ToHold, local: Tensor) -> Quantized | None:
    """What is held, cast again if its weight was written; None if a recording must not keep it.

    `local`: the weight, or this rank's part of it.
    """
    exporting = torch.compiler.is_exporting()
    if exporting and (_DYNAMO_TELLS or not torch.compiler.is_dynamo_compiling()):
        return None  # or the program would hold the data, too
    if torch.compiler.is_compiling():
        return _traced(of, local, operand)
    if _is_recording(local):
        return None
    _, stamp = operand.row.data.__dict__[_MADE_OF]
    # Not where the old one lies, which a backward still to come may read.
    return operand if stamp == _stamp(of.weight, of.scale) else hold(of)


def _is_recording(weight: Tensor) -> bool:
    """Whether operations go into a graph, which would keep the data for ever."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # slow to import

    if get_proxy_mode() is not None:
        return True
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


# ---------------------------------------------------------------- in compiled code


def _traced(of: ToHold, local: Tensor, operand: Quantized) -> Quantized:
    data, small = _flat(operand, of.spec)
    kind = of.spec.dtype, of.spec.granularity.value, of.spec.power_of_2
    small = torch.ops.float8.held_weight.default(local, data, small, of.scale, of.group, *kind)
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
    group: str | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_2: bool,
) -> list[Tensor]:
    """Make what is held of `weight` current, in place, and return copies of what is `small`.

    A compiler is not told of the writes: to it the data are what the weight is in float8, before
    and after. A CUDA graph, which is replayed without this code, records the cast itself.

    Args:
        weight: [N, K], this rank's part of one that ranks share.
        data: as `_flat` lists them, as is what follows.
        small: see there.
        scale: as in `ToHold`, as is what follows.
        group: see there.
        dtype: of the data.
        granularity: the value of a `ScalingGranularity`.
        power_of_2: whether scales are rounded up to powers of two.
    """
    # A CUDA graph may be given copies of the data.
    whole, stamp = data[0].__dict__.get(_MADE_OF, (weight, None))
    now = _stamp(whole, scale)
    recording = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    if recording or stamp != now:
        spec = CastSpec(dtype, ScalingGranularity(granularity), power_of_2=power_of_2)
        new_data, new_small = _flat(hold(ToHold(weight, spec, scale, group)), spec)
        old = [*data, *small]
        for target, source in zip(old, [*new_data, *new_small], strict=True):
            target.copy_(source)
        torch.autograd.graph.increment_version(old)  # a backward still to come shall notice
        data[0].__dict__[_MADE_OF] = whole, None if recording else now
    return [x.clone() for x in small]


def _held_weight_fake(
    weight: Tensor, data: list[Tensor], small: list[Tensor], *rest: Any
) -> list[Tensor]:
    return [torch.empty_like(x) for x in small]


register("held_weight", held_weight, triton=held_weight, fake=_held_weight_fake)
