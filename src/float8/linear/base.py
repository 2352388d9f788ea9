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
    """Return the attribute names with `PREFIX` of the float8 class `base` and its instances."""
    names = {"_float8_config", "_float8_plan", *dir(base)}
    return frozenset(name for name in names if name.startswith(PREFIX))


@functools.cache
def not_copied(cls: type) -> frozenset[str]:
    """Return the names of attributes that copies and pickles of `cls` leave out."""
    return frozenset().union(*(vars(x).get("_float8_not_copied", ()) for x in cls.__mro__))


class PlainFloat8Module(nn.Module):
    """Base class of float8 modules: configuration, copies, state dicts, conversion back.

    Mixins extend its methods: `Float8Module` adds weights that are held or in float8 only,
    `StatefulLayer`, a base of `Float8Linear`, adds delayed scaling.
    """

    _float8_config: Float8LinearConfig
    _float8_plan: LinearPlan
    _float8_source_class: ClassVar[type[nn.Module]]
    """The class of the module before conversion and after `convert_to_high_precision`."""
    _float8_observers: tuple[Callable[..., Any], ...] = ()
    """Functions of the operands and output of a forward that return the output; see `Watch`."""
    _float8_not_copied: ClassVar[frozenset[str]] = frozenset(
        {"_float8_attached", "_float8_observers"}
    )
    """Attributes that belong to this training and this optimizer: copies do not get them."""
    _float8_attached = 0
    """The number of optimizers that the module is attached to."""
    _float8_shards: Any = None
    """The `Shards` object that computes with a DTensor weight; `float8.wings` sets the default."""
    _float8_noun = "weight"
    """The word for the weights in `_float8_words`."""
    _float8_of_this_rank: tuple[str, ...] = ()
    """The names of Parameters and buffers that data parallel must neither send nor reduce."""
    _float8_stateful: tuple[Any, ...] = ()
    """The cast sites whose scales have a state, which the layer keeps in buffers."""
    _float8_held: tuple[Any, ...] = ()
    """Weights that are quantized already; other weights are quantized in each forward."""
    _float8_never_trains = False
    """Whether a weight that requires a gradient is refused."""

    @torch.inference_mode(False)  # else its tensors could not be saved for a backward
    def _float8_set_up(self, config: Float8LinearConfig, finish: bool = True) -> None:
        """Set the configuration, and reset all state.

        `finish`: call `_float8_finish` now; else the caller does, one module after another.
        """
        plan = self._float8_make_plan(config)  # which may raise
        self._float8_drop_state()
        self._float8_config, self._float8_plan, self._float8_of_this_rank = config, plan, ()
        self._float8_start_state()
        if finish:
            self._float8_finish()

    def _float8_make_plan(self, config: Float8LinearConfig) -> LinearPlan:
        return plan_linear(config)

    def _float8_start_state(self) -> None:
        """Make the state that the new configuration needs."""

    @torch.inference_mode(False)
    def _float8_finish(self) -> None:
        """Replace weights by float8 Parameters under `ONLY`; a no-op in this class."""

    def _float8_drop_state(self) -> None:
        """Remove what `_float8_set_up` added to the Parameters and buffers."""

    @classmethod
    def _float8_buffer_names(cls, config: Float8LinearConfig) -> set[str]:
        """Return the names of the buffers that a module with `config` adds."""
        return set()

    def _float8_state(self) -> dict[str, Tensor]:
        """Return the buffers of `_float8_buffer_names` by name."""
        return {}

    def _float8_with_state(self, casts: Casts) -> Casts:
        """Return `casts` with scale sources that read and write the buffers."""
        return casts

    def _float8_names(self) -> Sequence[str]:
        """Return the names of all weights."""
        return ("weight",)

    def _float8_weight(self, name: str) -> Any:
        """Return the attribute `name`, a Parameter or a tensor in its place, as [N, K]."""
        return getattr(self, name)

    def _float8_matrices(self) -> Sequence[str]:
        """Return the names of weights that can be in float8 only, stored as [N, K] or [E, N, K]."""
        return ("weight",)

    def _float8_groups(self) -> tuple[Any, ...]:
        """Return the process groups over which the weight is sharded; empty for a plain tensor."""
        weight: Any = getattr(self, "weight", None)
        return sharding_groups(weight) if hasattr(weight, "device_mesh") else ()

    def _float8_attach(self) -> None:
        """Count one more optimizer that the module is attached to."""
        self._float8_attached += 1

    def _float8_detach(self) -> None:
        """Count one optimizer fewer that the module is attached to."""
        self._float8_attached = max(self._float8_attached - 1, 0)

    def _float8_loadable(self, old: Any, values: Any, local_metadata: dict[str, Any]) -> Any:
        """Return checkpoint `values` to load into `old`; here, a `Float8Tensor` is dequantized."""
        return dequantise(values) if isinstance(values, Float8Tensor) else values

    def _float8_words(self) -> list[str]:
        """Return texts for `extra_repr` on how the weights are stored."""
        return [] if self._float8_shards is None else self._float8_shards.words(self)

    def _float8_become_high_precision(self) -> None:
        """Convert this module back to `_float8_source_class`, in place."""
        self._float8_drop_state()
        self.__dict__.pop("forward", None)  # that of its class, which accelerate leaves behind
        source = self._float8_source_class  # may be its own attribute
        cls: Any = type(self)
        for name in our_names(cls) & vars(self).keys():
            del self.__dict__[name]
        self.__class__ = source  # type: ignore[assignment]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in [] if keep_vars else map(prefix.__add__, self._parameters):
            if key in destination:
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
            if new is not None and new is not old:  # by assign=True
                self._parameters[name] = wrapped_like(new, old)

    def __getstate__(self) -> Any:
        getstate = getattr(super(), "__getstate__", None)  # Python 3.10 has none for all objects
        state = self.__dict__ if getstate is None else getstate()
        if not isinstance(state, dict):
            return state
        left_out = not_copied(type(self))  # type: ignore[arg-type]
        return {name: value for name, value in state.items() if name not in left_out}


class Float8Module(HoldsWeights, OnlyWeights, PlainFloat8Module):
    """Base class of linear layers and experts; weights may be held or in float8 only."""
