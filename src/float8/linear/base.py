"""The base class of linear layers and experts in float8: copies, state dicts, the way back."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from float8.config import Float8LinearConfig
from float8.linear.plan import LinearPlan
from float8.tensor import high_precision
from float8.tensor.gather import gathered_like
from float8.tensor.ranks import sharding_groups
from float8.weights.held import HoldsWeights
from float8.weights.only import OnlyWeights

PREFIX = "_float8_"
"""The prefix of private attributes that this library adds to layers and experts."""


@functools.cache
def our_names(base: type) -> frozenset[str]:
    """Return the attribute names with `PREFIX` of the float8 class `base` and its instances."""
    every = {"_float8_config", "_float8_plan", *dir(base)}
    return frozenset(name for name in every if name.startswith(PREFIX))


class Float8Module(HoldsWeights, OnlyWeights, nn.Module):
    """The base class of linear layers and experts in float8."""

    _float8_config: Float8LinearConfig
    _float8_plan: LinearPlan
    _float8_source_class: ClassVar[type[nn.Module]]
    """The class of the module before conversion and after `convert_to_high_precision`."""
    _float8_observers: tuple[Callable[..., Any], ...] = ()
    """Functions that see what is multiplied and return the output, as those of a `Watch`."""
    _float8_not_copied: ClassVar[frozenset[str]] = frozenset(
        {"_float8_held", "_float8_attached", "_float8_observers"}
    )
    """Attributes that belong to this training and this optimizer: copies do not get them."""
    _float8_stateful: tuple[Any, ...] = ()
    """The cast sites whose scales have a state, which the layer keeps in buffers."""

    @classmethod
    def _float8_buffer_names(cls, config: Float8LinearConfig) -> set[str]:
        """Return the names of the buffers that a module with `config` adds."""
        return set()

    def _float8_add_state(self) -> None:
        """Register the buffers that the configuration asks for."""

    def _float8_state(self) -> dict[str, Tensor]:
        """Return the buffers of `_float8_buffer_names` by name."""
        return {}

    def _float8_groups(self) -> tuple[Any, ...]:
        """Return the process groups over which the weight is sharded; empty for a plain tensor."""
        weight: Any = getattr(self, "weight", None)
        return sharding_groups(weight) if hasattr(weight, "device_mesh") else ()

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
        before, given = {**self._parameters}, {}
        for name, old in before.items():
            if (values := state_dict.get(prefix + name)) is not None:
                given[prefix + name] = self._float8_loadable(old, values, local_metadata)
        super()._load_from_state_dict(state_dict | given, prefix, local_metadata, *rest)
        for name, old in before.items():
            new: Any = self._parameters.get(name)
            if new is not None and new is not old:  # by assign=True
                self._parameters[name] = gathered_like(new, old)

    def __getstate__(self) -> Any:
        theirs = getattr(super(), "__getstate__", None)  # Python 3.10 has none for all objects
        state = self.__dict__ if theirs is None else theirs()
        if not isinstance(state, dict):
            return state
        return {name: value for name, value in state.items() if name not in self._float8_not_copied}
