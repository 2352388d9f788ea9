"""Notices an optimizer step that delayed scaling was not told of.

Training on with stale scales is an error that no loss curve shows at once. The optimizer's step
is the only moment that tells "train on" from gradient accumulation, so a hook on it compares the
version counters of the amaxes with those at the last sync: no device sync, nothing inside the
compiled graph but one bool that stays False as long as all is well.
"""

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watched(Protocol):
    """A layer with delayed scaling."""

    sync_overdue: bool

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its Parameters, those of modules inside it included."""

    def has_unsynced_amax(self) -> bool:
        """Whether an amax was recorded since the last sync."""


_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()
_hooks: list[torch.utils.hooks.RemovableHandle] = []


def watch(layer: Watched) -> None:
    """Mark `layer.sync_overdue` when an optimizer steps a Parameter of it between amax and sync.

    Only Parameters of its own tell whose step it was: two models may train each with its own
    optimizer and run through each other. A layer that is frozen as a whole is not noticed.
    """
    if not _hooks:  # no hook in a process that never uses delayed scaling
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    _watched.add(layer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for layer in _watched:
        if layer.has_unsynced_amax() and any(id(p) in stepped for p in layer.parameters()):
            layer.sync_overdue = True
