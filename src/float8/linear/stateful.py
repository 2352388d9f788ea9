"""What a `Float8Linear` knows besides its Parameters, while it is moved, copied, saved and loaded.

That is the delayed-scaling buffers, whether they were synced, and a cast of the weight that may be
kept. How the layer computes is in `float8_linear.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from float8.config import CastSite, Float8LinearConfig
from float8.linear import overdue, state
from float8.linear.cached import WeightCache
from float8.quantize.history import UNKNOWN_SCALE
from float8.quantize.spec import Quantized
from float8.tensor import high_precision, with_plan_of


class StatefulLinear(nn.Linear):
    """An `nn.Linear` with that state."""

    config: Float8LinearConfig
    sync_overdue: bool
    cached_weight: Quantized | None = None
    """The weight in float8 inside `float8.cached_weights`."""
    weight_cache: WeightCache | None = None
    _synced_versions: list[int] | None
    _weight_scale_known: bool
    _delayed: tuple[tuple[str, str, str], ...]

    def reset_parameters(self) -> None:
        """Initialise weight and bias as `nn.Linear` does, and forget all amaxes."""
        super().reset_parameters()
        if "config" in self.__dict__:  # not yet while nn.Linear.__init__ runs
            state.reset_buffers(self, self.config)
            self._weight_scale_known = False
            self.mark_synced()

    def knows_weight_scale(self) -> bool:
        """Whether delayed scaling has a scale for the weight: looks, on the device, until so."""
        if not self._weight_scale_known:
            scale = self.get_buffer(state.scale_name(CastSite.WEIGHT))
            self._weight_scale_known = scale.item() != UNKNOWN_SCALE
        return self._weight_scale_known

    def has_unsynced_amax(self) -> bool:
        """Whether an amax was recorded since the last sync."""
        return self._amax_versions() != self._synced_versions

    def mark_synced(self) -> None:
        """Note that all amaxes recorded so far are in the history."""
        self.cached_weight = None  # its scale was the last one
        self.sync_overdue = False
        self._synced_versions = self._amax_versions()

    def _amax_versions(self) -> list[int]:
        return [
            buffer._version
            for _, _, amax in self._delayed
            if (buffer := self._buffers[amax]) is not None and not buffer.is_inference()
        ]

    def _watch(self) -> None:
        self._delayed = tuple(
            (site.value, state.scale_name(site), state.amax_name(site))
            for site in self.config.delayed_sites
        )
        self._synced_versions = self._amax_versions()
        self._weight_scale_known = False
        if self._delayed and self.config.enable_pre_and_post_forward:
            overdue.watch(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cached_weight": None, "weight_cache": None}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        super().__setstate__(pickled)  # type: ignore[no-untyped-call]
        self._watch()  # a copy is a layer of its own

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """`nn.Module`'s, which assigning a Parameter calls, too."""
        super().register_parameter(name, param)
        self.cached_weight = None

    def _replicate_for_data_parallel(self) -> "StatefulLinear":
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica.cached_weight = replica.weight_cache = None  # on another device
        return replica  # type: ignore[no-any-return]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StatefulLinear":
        self.cached_weight = None
        before = {name: self._buffers[name] for name in state.buffer_names(self.config)}
        unsynced = self.has_unsynced_amax()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            assert old is not None
            assert new is not None
            if new.dtype != torch.float32:  # `.half()`: move, but never through fewer bits
                self._buffers[name] = old.to(new.device)
        if any(old is not None and old.is_meta for old in before.values()):
            state.reset_buffers(self, self.config)  # `to_empty()` left them undefined
        self._weight_scale_known = False
        # New buffers count versions anew.
        self._synced_versions = None if unsynced else self._amax_versions()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and (weight := destination.get(prefix + "weight")) is not None:
            destination[prefix + "weight"] = high_precision(weight)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missing: list[str] = []
        old_weight = self._parameters["weight"]
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        # For assign=True, which replaces tensors by others.
        if (weight := self._parameters["weight"]) is not old_weight and weight is not None:
            self._parameters["weight"] = with_plan_of(weight, old_weight)
        state.repair_buffers(self, self.config, self.weight.device)
        ours = {prefix + name for name in state.buffer_names(self.config)}
        if ours.isdisjoint(state_dict):  # a checkpoint of the plain model
            missing = [key for key in missing if key not in ours]
            if any(prefix + name in state_dict for name in self._parameters):
                state.reset_buffers(self, self.config)  # what they knew was of other weights
        missing_keys.extend(missing)
        self._weight_scale_known = False
        self.mark_synced()  # writing the buffers was no recording of amaxes
