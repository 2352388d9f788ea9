"""What a run must remember to go on bit for bit, for `torch.distributed.checkpoint`.

A model is `Stateful` as it is; this is the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


class OptimizerState:
    """What an optimizer has gathered about parameters, by their names; its settings stay.

    Before the first step there is nothing to save, and torch would take a step to make something.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Dict by parameter of dicts of tensors, which are the live ones; sharded as they are."""
        state = get_optimizer_state_dict(self._model, self._optimizer)["state"]
        assert isinstance(state, dict)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        whole = get_optimizer_state_dict(self._model, self._optimizer)
        whole["state"] = state
        set_optimizer_state_dict(self._model, self._optimizer, whole)


class RandomState:
    """The states of PyTorch's random-number generators that a run on `device` may use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """One uint8 tensor per generator, on the CPU."""
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        torch.set_rng_state(state["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self._device)
