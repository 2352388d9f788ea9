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
    """Return all names of attributes of class `base` and its instances that begin with `PREFIX`."""
    names = {"_float8_config", "_float8_plan", *dir(base)}
    return frozenset(name for name in names if name.startswith(PREFIX))


@functools.cache
def not_copied(cls: type) -> frozenset[str]:
    """Return the names of attributes that a copy or pickle of a `cls` instance leaves out."""
    return frozenset().union(*(vars(x).get("_float8_not_copied", ()) for x in cls.__mro__))


class PlainFloat8Module(nn.Module):
    """Base class of float8 modules: holds the configuration; copies, saves, loads, converts back.

    Mixins extend its methods: `Float8Module` adds weights that are held or in float8 only,
    `StatefulLayer`, a base of `Float8Linear`, adds delayed scaling.
    """

    _float8_config: Float8LinearConfig
    _float8_plan: LinearPlan
    _float8_source_class: ClassVar[type[nn.Module]]
    """The class of the module before conversion and after `convert_to_high_precision`."""
    _float8_observers: tuple[Callable[..., Any], ...] = ()
    """Called with `(self, casts, input, weight, output[, offs, name])`; return the output."""
    _float8_not_copied: ClassVar[frozenset[str]] = frozenset(
        {"_float8_attached", "_float8_observers"}
    )
    """Attributes that copies leave out, since they belong to one training and its optimizers."""
    _float8_attached = 0
    """The number of optimizers that the module is attached to."""
    _float8_shards: Any = None
    """The `Shards` object that computes with a DTensor weight; `float8.wings` sets the default."""
    _float8_noun = "weight"
    """The word for the weights in `_float8_words`."""
    _float8_of_this_rank: tuple[str, ...] = ()
    """The names of Parameters and buffers that data parallel must neither send nor reduce."""
    _float8_stateful: tuple[Any, ...] = ()
    """The cast sites with delayed scaling, whose state the layer keeps in buffers."""
    _float8_held: tuple[Any, ...] = ()
    """`Held` weights, quantized in advance; other weights are quantized in each forward."""
    _float8_never_trains = False
    """Whether weights that require grad are refused, as with `Float8Weights.ONLY`."""

    @torch.inference_mode(False)  # else its tensors could not be saved for a backward
    def _float8_set_up(self, config: Float8LinearConfig, finish: bool = True) -> None:
        """Set the configuration to `config`, and reset all state that depends on it.

        If `finish` is False, `ONLY` quantizes weights only when the caller calls `_float8_finish`.
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
        """Create the state that `self._float8_config` needs; mixins extend this."""

    @torch.inference_mode(False)
    def _float8_finish(self) -> None:
        """Replace weights by float8 Parameters if configured with `ONLY`; a no-op in this class."""

    def _float8_drop_state(self) -> None:
        """Undo the changes of `_float8_set_up` to Parameters and buffers; mixins extend this."""

    @classmethod
    def _float8_buffer_names(cls, config: Float8LinearConfig) -> set[str]:
        """Return the names of the buffers that `config` adds to a module; empty in this class."""
        return set()

    def _float8_state(self) -> dict[str, Tensor]:
        """Return the buffers that the configuration added, by name; empty in this class."""
        return {}

    def _float8_with_state(self, casts: Casts) -> Casts:
        """Return `casts`; mixins return them with scale sources that use this module's buffers."""
        return casts

    def _float8_names(self) -> Sequence[str]:
        """Return the attribute names of all weights of this module."""
        return ("weight",)

    def _float8_weight(self, name: str) -> Any:
        """Return the weight [N, K] called `name`: a Parameter, or a tensor computed from one."""
        return getattr(self, name)

    def _float8_matrices(self) -> Sequence[str]:
        """Return the names of the weights stored as [N, K] or [E, N, K], which `ONLY` quantizes."""
        return ("weight",)

    def _float8_shard_groups(self) -> tuple[Any, ...]:
        """Return the process groups over which `self.weight` is sharded; () for a plain tensor."""
        weight: Any = getattr(self, "weight", None)
        return sharding_groups(weight) if hasattr(weight, "device_mesh") else ()

    def _float8_attach(self) -> None:
        self._float8_attached += 1

    def _float8_detach(self) -> None:
        self._float8_attached = max(self._float8_attached - 1, 0)

    def _float8_loadable(self, old: Any, values: Any, local_metadata: dict[str, Any]) -> Any:
        """Return `values` to load into Parameter `old`, dequantized if they are in float8."""
        return dequantise(values) if isinstance(values, Float8Tensor) else values

    def _float8_words(self) -> list[str]:
        """Return strings for `extra_repr` that say how the weights are stored."""
        return [] if self._float8_shards is None else self._float8_shards.words(self)

    def _float8_become_high_precision(self) -> None:
        """Convert this module back to `_float8_source_class`, in place."""
        self._float8_drop_state()
        self.__dict__.pop("forward", None)  # accelerate leaves the class's forward here
        source = self._float8_source_class  # read before an attribute is deleted
        cls: Any = type(self)
        for name in our_names(cls) & vars(self).keys():
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
        for name, old in before.items():
            if (values := state_dict.get(prefix + name)) is not None:
                loadable[prefix + name] = self._float8_loadable(old, values, local_metadata)
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
    """Base class of all float8 linear layers and experts; handles all modes of `Float8Weights`."""
