"""The weight of a layer, kept in float8 from one forward to the next.

Nothing is kept by default: `float8.cached_weights` opens a cache on each layer and closes it. In
between, eager code compares at every forward what was cast with the weight as it is. Compiled code
cannot; it takes `layer.cached_weight` as an input of its graph. So whatever can announce a change
(loading, moving, a new Parameter, a sync, an optimizer's step) drops or renews the operand, and
what cannot, a write by hand, is told from the version counter before its result is used.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from float8.quantize.quantize import quantize
from float8.quantize.spec import Quantized

PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
"""Weights that are data in memory and nothing else: no shards, no wrappers."""


class WeightCache:
    """What one layer's cached operand was made of; exists while the cache is open."""

    operand: Quantized | None = None
    """The last one: its memory, valid or not."""

    seen_by_eager = False
    """Whether eager code asked for the operand, and so compared it with the weight."""

    _weight: Tensor | None = None
    _state = (-1, -1)

    def holds(self, weight: Tensor | None) -> bool:
        """Whether the operand was made of `weight` as it is, as far as its counters tell."""
        if weight is None or self._weight is not weight:
            return False
        return self._state == (weight._version, weight.data_ptr())

    def memory_for(self, weight: Tensor) -> Quantized | None:
        """Where an operand of this very weight was before."""
        return self.operand if self._weight is weight else None

    def keep(self, layer: Any, operand: Quantized, weight: Tensor) -> None:
        """Make `operand`, just made of `weight`, the cached one of `layer`."""
        layer.cached_weight = self.operand = operand
        self._weight, self._state = weight, (weight._version, weight.data_ptr())


# In what follows `layer` is a `Float8Linear`, which stands above this module.


def can_cache(layer: Any, weight: Tensor | None) -> bool:
    """Whether one cast of `weight` serves both GEMMs that take it, and can be kept."""
    plan = layer.plan
    return (
        weight is not None
        and type(weight) in PLAIN
        and plan.share_weight
        and plan.output is not None
        and plan.grad_input is not None
        and weight.shape == (layer.out_features, layer.in_features)  # else a flattened shard
        and not weight.is_meta
        and not weight.is_inference()  # has no version counter
    )


def current_operand(layer: Any, weight: Tensor) -> Quantized | None:
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
        cache.keep(layer, cast_weight(layer, weight), weight)
    cache.seen_by_eager = True
    return layer.cached_weight  # type: ignore[no-any-return]


# What is made in inference mode cannot be saved for a backward.
@torch.inference_mode(False)
@torch.no_grad()
def cast_weight(layer: Any, weight: Tensor, memory: Quantized | None = None) -> Quantized:
    """Cast `weight` [N, K] to both layouts in one read, into `memory` if that has the right shapes.

    With delayed scaling nothing is recorded yet: the operand carries its amax, and each forward
    records it that would have recorded the cast's.
    """
    spec, state = layer.plan.weight, layer.weight_state()
    amax = None
    if state is not None:
        amax = torch.zeros_like(state.amax)
        state = state._replace(amax=amax)
    made = quantize(weight, spec, row=True, col=True, pad_rows=True, state=state, record=True)
    made = made._replace(amax=amax)
    if memory is None:
        return made
    old, new = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in (memory, made))
    if [x.shape for x in old] != [x.shape for x in new]:
        return made
    for target, source in zip(old, new, strict=True):
        target.copy_(source)
    return memory


def _is_recording(weight: Tensor) -> bool:
    """Whether operations go into a graph, which would keep the operand for ever."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # slow to import

    if get_proxy_mode() is not None:
        return True
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
