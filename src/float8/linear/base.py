"""The base class of linear layers and experts in float8: copies, state dicts, conversion back."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from float8.config import Float8LinearConfig
from float8.linear.plan import Casts, LinearPlan, plan_linear
from float8.tensor import Float8Tensor, dequantise
from float8.tensor.ranks import sharding_groups
from float8.tensor.weights import high_precision, wrapped_like
from float8.weights.held import HoldsWeights
from float8.weights.only import OnlyWeights

PREFIX = "_float8_"
"""The prefix of private attributes that this library adds to layers and experts."""


@functools.cache
def our_names(base: type) -> frozenset[str]:
    """Return names of attributes, all "_float8_...", that float8 class `base` adds to modules."""
    names = {"_float8_config", "_float8_plan", *dir(base)}
    return frozenset(name for name in names if name.startswith(PREFIX))


@functools.cache
def not_copied(cls: type) -> frozenset[str]:
    """Return the attributes that copies leave out: `_float8_not_copied` of `cls` and its bases."""
    return frozenset().union(*(vars(x).get("_float8_not_copied", ()) for x in cls.__mro__))


class PlainFloat8Module(nn.Module):
    """Base class of float8 layers: keeps a `Float8LinearConfig`, loads, saves and converts back.

    Mixins extend its methods. `Float8Module` adds float8 casts of weights that are kept beside the
    weights (`Float8Weights.HELD`) or replace them (`ONLY`). `StatefulLayer` adds the buffers of
    delayed scaling.
    """

    _float8_config: Float8LinearConfig
    _float8_plan: LinearPlan
    _float8_source_class: ClassVar[type[nn.Module]]
    """The class of the module before conversion and after `convert_to_high_precision`."""
    _float8_observers: tuple[Callable[..., Any], ...] = ()
    """Called in forward, `f(self, casts, input, weight, output[, offs, name])`, for the output."""
    _float8_not_copied: ClassVar[frozenset[str]] = frozenset(
        {"_float8_attached", "_float8_observers"}
    )
    """Attributes that copies and pickles leave out, as they belong to one training."""
    _float8_attached = 0  # number of optimizers that the module is attached to
    _float8_shards: Any = None  # computes with DTensor weights; `float8.wings` sets `Shards()`
    _float8_noun = "weight"  # the word for the weights in `_float8_words`
    _float8_of_this_rank: tuple[str, ...] = ()
    """The names of Parameters and buffers that data parallel must neither send nor reduce."""
    _float8_stateful: tuple[Any, ...] = ()  # GEMM operands with delayed scaling, state in buffers
    _float8_held: tuple[Any, ...] = ()  # `Held` weights: their float8 casts are kept until a write
    _float8_never_trains = False  # whether weights are in float8 only (`Float8Weights.ONLY`)

    @torch.inference_mode(False)  # else its tensors could not be saved for a backward
    def _float8_set_up(self, config: Float8LinearConfig, finish: bool = True) -> None:
        """Apply `config` to this float8 layer: plan its casts, create buffers, quantize weights.

        Before, it deletes old buffers, and dequantizes weights in float8 only. `Float8Weights.ONLY`
        quantizes weights: now or, if not `finish`, in a later call of `_float8_finish()`.
        """
        plan = self._float8_make_plan(config)  # first, since this may raise
        self._float8_drop_state()
        self._float8_config, self._float8_plan, self._float8_of_this_rank = config, plan, ()
        self._float8_start_state()
        if finish:
            self._float8_finish()

    def _float8_make_plan(self, config: Float8LinearConfig) -> LinearPlan:
        return plan_linear(config)

    def _float8_start_state(self) -> None:
        """Do nothing here; mixins create buffers and flags for a new `self._float8_config`."""

    def _float8_finish(self) -> None:
        """End a conversion: a mixin replaces weights by float8 ones under `Float8Weights.ONLY`."""

    def _float8_drop_state(self) -> None:
        """Do nothing here; mixins delete buffers, and dequantize weights that have no master."""

    @classmethod
    def _float8_buffer_names(cls, config: Float8LinearConfig) -> set[str]:
        """Return names of buffers that a layer with `config` has for delayed scaling; none here."""
        return set()

    def _float8_state(self) -> dict[str, Tensor]:
        """Return {name: buffer} of the buffers for delayed scaling: an empty dict in this class."""
        return {}

    def _float8_with_state(self, casts: Casts) -> Casts:
        """Return `casts`, those of this layer; mixins for delayed scaling add its stored scales."""
        return casts

    def _float8_names(self) -> Sequence[str]:
        """Return the attribute names of all weights of this module."""
        return ("weight",)

    def _float8_weight(self, name: str) -> Any:
        """Return attribute `name`, a weight [N, K]: a Parameter, or a tensor computed from one."""
        return getattr(self, name)

    def _float8_matrices(self) -> Sequence[str]:
        """Return the names of the weights, [N, K] or [E, N, K], that `Float8Weights.ONLY` casts."""
        return ("weight",)

    def _float8_shard_groups(self) -> tuple[Any, ...]:
        """Return the process groups over which `self.weight` is sharded; () for a plain tensor."""
        weight: Any = getattr(self, "weight", None)
        return sharding_groups(weight) if hasattr(weight, "device_mesh") else ()

    def _float8_attach(self) -> None:
        self._float8_attached += 1

    def _float8_detach(self) -> None:
        self._float8_attached = max(self._float8_attached - 1, 0)

    def _float8_loadable(self, old: Any, values: Any, assign: bool) -> Any:
        """Return `values` to load for `old`, dequantized if in float8; `assign` is for mixins."""
        return dequantise(values) if isinstance(values, Float8Tensor) else values

    def _float8_words(self) -> list[str]:
        """Return phrases for `extra_repr`, such as "weight held in float8", or an empty list."""
        return [] if self._float8_shards is None else self._float8_shards.words(self)

    def _float8_become_high_precision(self) -> None:
        """Undo the conversion of this module in place: restore the class that it had before."""
        self._float8_drop_state()
        self.__dict__.pop("forward", None)  # accelerate leaves the class's forward here
        source = self._float8_source_class  # read before an attribute is deleted
        for name in our_names(type(self)) & vars(self).keys():  # type: ignore[arg-type]
            del self.__dict__[name]
        self.__class__ = source  # type: ignore[assignment]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if keep_vars else self._parameters:
            if (key := prefix + name) in destination:
                destination[key] = high_precision(destination[key])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        before, loadable = {**self._parameters}, {}
        assign = local_metadata.get("assign_to_params_buffers", False)
        for name, old in before.items():
            if (values := state_dict.get(prefix + name)) is not None:
                loadable[prefix + name] = self._float8_loadable(old, values, assign)
        super()._load_from_state_dict(state_dict | loadable, prefix, local_metadata, *rest)
        for name, old in before.items():
            new: Any = self._parameters.get(name)
            if new is not None and new is not old:  # replaced, by load_state_dict(assign=True)
                self._parameters[name] = wrapped_like(new, old)

    def __getstate__(self) -> Any:
        getstate = getattr(super(), "__getstate__", None)  # Python 3.10 has none for all objects
        state = self.__dict__ if getstate is None else getstate()
        if not isinstance(state, dict):
            return state
        left_out = not_copied(type(self))  # type: ignore[arg-type]
        return {name: value for name, value in state.items() if name not in left_out}


class Float8Module(HoldsWeights, OnlyWeights, PlainFloat8Module):
    """Base class of all float8 linear layers and experts, with mixins for `Float8Weights`."""
