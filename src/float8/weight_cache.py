"""Weights cast once for all microbatches of gradient accumulation."""

import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from float8.arguments import require_module
from float8.linear import Float8Linear
from float8.linear.cached import PLAIN, WeightCache, can_cache, cast_weight
from float8.quantize.spec import Quantized
from float8.tensor import Float8Tensor
from float8.untraced import untraced


def cached_weights(model: nn.Module) -> "CachedWeights":
    """A context in which the weight of each `Float8Linear` of `model` is cast only once.

        with float8.cached_weights(model):
            for microbatch in batch:
                loss(model(microbatch)).backward()
        optimizer.step()

    Without it every forward and every backward casts the weights anew. On entry, each weight
    [N, K] is cast to both GEMM layouts in one read; all results stay bitwise the same, eager or
    compiled. On exit everything is dropped. In between it takes two bytes per weight element.

    A weight that changes inside is cast again: at the step of any `torch.optim` optimizer, after
    `load_state_dict`, `.to()`, `reset_parameters()`, a sync of delayed scaling, for a new Parameter
    in its place, and in eager mode after a write by hand. For a layer that only compiled code runs,
    a write by hand raises a `RuntimeError` at the next optimizer step or on exit. Only writes that
    hide from version counters (`weight.data.mul_(2)`, a raw pointer) go unnoticed.

    Run the backward inside too: under eager activation checkpointing it must be, elsewhere it may
    come later, unless the same object is entered again before, which writes into that memory.
    Compiled code takes the cached operand whatever weight `torch.func.functional_call` gives it.
    Layers that cast the weight differently for its two GEMMs, or not at all, cast as ever. So do
    layers whose weight is no plain tensor, as under FSDP2; a warning names them.

    The object can be entered again and then takes the memory it had before, which lives as long as
    the object: with CUDA graphs (`mode="reduce-overhead"`), which are recorded anew for inputs at
    new addresses, make it once. Within itself, or within another one, it changes nothing.

    Args:
        model: the converted model, compiled or not.

    Raises:
        TypeError: `model` is no module.
    """
    return CachedWeights(model)


class CachedWeights:
    """See `cached_weights`."""

    def __init__(self, model: nn.Module) -> None:
        require_module(model, "model")
        self._model = model
        self._depth = 0
        self._caches: dict[Float8Linear, WeightCache] = {}
        self._hooks: list[RemovableHandle] = []

    @untraced
    def __enter__(self) -> None:
        """Cast all weights."""
        self._depth += 1
        if self._depth > 1:
            return
        try:
            self._caches = {x: self._caches.get(x) or WeightCache() for x in self._find()}
            for layer, cache in self._caches.items():
                layer.weight_cache, cache.seen_by_eager = cache, False
            self._cast(self._caches)
            if self._caches:
                self._hooks = [
                    register_optimizer_step_pre_hook(self._require_unchanged),
                    register_optimizer_step_post_hook(self._after_step),
                ]
        except BaseException:
            self._close()
            raise

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Drop all casts.

        Raises:
            RuntimeError: a weight was written by hand while compiled code used the cached one.
        """
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            if error is None:
                self._require_unchanged()
        finally:
            self._close()

    def _find(self) -> list[Float8Linear]:
        """The layers to cache; warns of those that should be but cannot."""
        found, others = [], []
        for name, layer in self._model.named_modules():
            if not isinstance(layer, Float8Linear) or layer.weight_cache is not None:
                continue
            weight = layer._parameters.get("weight")  # not one that is computed at each access
            if can_cache(layer, weight):
                found.append(layer)
            elif weight is not None and type(weight) not in (*PLAIN, Float8Tensor):
                others.append(f"{name or '(root)'} ({type(weight).__name__})")
        if others:
            warnings.warn(
                f"float8.cached_weights: {len(others)} layer(s) cast their weight at each forward, "
                f"because it is no plain tensor: {', '.join(others[:3])} ...",
                stacklevel=5,
            )
        return found

    def _cast(self, layers: Iterable[Float8Linear]) -> None:
        """Cast the weights of `layers`; one that several layers share only once."""
        done: dict[Any, Quantized] = {}
        for layer in layers:
            weight, cache = layer._parameters.get("weight"), self._caches[layer]
            layer.cached_weight = None
            if weight is None or not can_cache(layer, weight):
                continue
            # With delayed scaling each layer has a scale of its own.
            key = (id(weight), layer if layer.plan.weight.delayed else layer.plan.weight)
            if key not in done:
                done[key] = cast_weight(layer, weight, cache.memory_for(weight))
            cache.keep(layer, done[key], weight)

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer, cache in self._caches.items():
            if layer.weight_cache is cache:
                layer.cached_weight = layer.weight_cache = None
        self._hooks, self._depth = [], 0

    # ---------------------------------------------------------------- changes inside

    @untraced
    def _require_unchanged(self, *_: Any) -> None:
        """Right before a step, too: after it nobody can tell."""
        for layer, cache in self._caches.items():
            if layer.cached_weight is None or cache.seen_by_eager:
                continue  # not used, or compared at each use
            if not cache.holds(layer._parameters.get("weight")):
                names = {module: name for name, module in self._model.named_modules()}
                name = names.get(layer) or "(root)"
                raise RuntimeError(
                    f"float8.cached_weights: the weight of layer {name!r} was written "
                    f"by hand inside the context, where compiled code may have used the old one; "
                    f"write it outside, or through a torch.optim optimizer or load_state_dict"
                )

    @untraced
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # By its groups too: an optimizer may write through `.data`.
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        changed = []
        for layer, cache in self._caches.items():
            weight = layer._parameters.get("weight")
            if id(weight) in stepped or layer.cached_weight is None or not cache.holds(weight):
                changed.append(layer)
        self._cast(changed)
