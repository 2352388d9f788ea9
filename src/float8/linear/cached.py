"""The weight of a layer, kept in float8 from one forward to the next.

Nothing is kept by default: `float8.cached_weights` opens a cache on each layer and closes it. In
between, eager code compares at every forward what was cast with the weight as it is. Compiled code
cannot; it takes `layer.cached_weight` as an input of its graph. So whatever can announce a change
(loading, moving, a new Parameter, a sync, an optimizer's step) drops or renews the operand, and
what cannot, a write by hand, is told from the version counter before its result is used.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from float8.cast import Operand, quantize
from float8.linear.plan import LinearPlan
from float8.scaling import DelayedScale

PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
"""Weights that are data in memory and nothing else: no shards, no wrappers."""


class WeightCache:
    """What one layer's cached operand was made of; exists while the cache is open."""

    def __init__(self) -> None:
        self.operand: Operand | None = None
        """The last one: its memory, valid or not."""

        self.seen_by_eager = False
        """Whether eager code asked for the operand, and so compared it with the weight."""

        self._weight: Tensor | None = None
        self._version = self._address = -1

    def holds(self, weight: Tensor | None) -> bool:
        """Whether the operand was made of `weight` as it is, as far as its counters tell."""
        return (
            weight is not None
            and self._weight is weight
            and self._version == weight._version
            and self._address == weight.data_ptr()
        )

    def memory_for(self, weight: Tensor) -> Operand | None:
        """Where an operand of this very weight was before."""
        return self.operand if self._weight is weight else None

    def keep(self, operand: Operand, weight: Tensor) -> None:
        """Note that `operand` was made of `weight` as it is now."""
        self.operand = operand
        self._weight, self._version, self._address = weight, weight._version, weight.data_ptr()


class CachingLayer(Protocol):
    """What caching needs of a `Float8Linear`."""

    plan: LinearPlan
    in_features: int
    out_features: int
    cached_weight: Operand | None
    weight_cache: WeightCache | None

    def weight_state(self) -> DelayedScale | None:
        """The delayed-scaling state of the weight's cast, if it has one."""


def can_cache(layer: CachingLayer, weight: Tensor | None) -> bool:
    """Whether one cast of `weight` serves both GEMMs that take it, and can be kept."""
    plan = layer.plan
    return (
        type(weight) in PLAIN
        and weight is not None
        and plan.share_weight
        and plan.output.float8
        and plan.grad_input.float8
        and weight.shape == (layer.out_features, layer.in_features)  # else a flattened shard
        and not weight.is_meta
        and not weight.is_inference()  # has no version counter
    )


def current_operand(layer: CachingLayer, weight: Tensor) -> Operand | None:
    """The cached operand of `weight`, made again if that has changed; eager mode only.

    None if it must not be used: by what is recorded to be run again later.
    """
    cache = layer.weight_cache
    if cache is None or _is_recording(weight):
        return None
    if layer.cached_weight is None or not cache.holds(weight):
        layer.cached_weight = None
        if not can_cache(layer, weight):
            return None
        # Not where the old one lies, which a backward still to come may read.
        renew(layer, cache, weight, cast_weight(layer, weight))
    cache.seen_by_eager = True
    return layer.cached_weight


def renew(layer: CachingLayer, cache: WeightCache, weight: Tensor, operand: Operand) -> None:
    """Make `operand`, just made of `weight`, the cached one."""
    cache.keep(operand, weight)
    layer.cached_weight = operand


# What is made in inference mode cannot be saved for a backward.
@torch.inference_mode(False)
@torch.no_grad()
def cast_weight(layer: CachingLayer, weight: Tensor, memory: Operand | None = None) -> Operand:
    """Cast `weight` [N, K] to both layouts in one read, as `layer` would for its GEMMs.

    With delayed scaling nothing is recorded yet: the operand carries its amax, and each forward
    records it that would have recorded the cast's.

    Args:
        layer: whose plan and delayed-scaling state are used.
        weight: float32, bfloat16 or float16.
        memory: an operand that is overwritten, so that addresses stay, if it has the right shape.
    """
    plan, state = layer.plan.weight, layer.weight_state()
    amax = None
    if state is not None:
        amax = torch.zeros_like(state.amax)
        state = state._replace(amax=amax)
    operand = quantize(weight, plan, state, row=True, col=True, pad_rows=True, record=True)
    operand = operand._replace(amax=amax)
    if memory is None or _layout(memory) != _layout(operand):
        return operand
    for old, new in zip(memory, operand, strict=True):
        if old is not None and new is not None:
            old.copy_(new)
    return memory


def _layout(operand: Operand) -> list[object]:
    return [None if x is None else (x.shape, x.dtype, x.device) for x in operand]


def _is_recording(weight: Tensor) -> bool:
    """Whether operations go into a graph, which would keep the operand for ever."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return True
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
