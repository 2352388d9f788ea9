"""A sync updates the buffers that the layers have now, whatever happened to the model before."""

import copy

import pytest
import torch
from torch import nn

from float8 import (
    Float8Linear,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import delayed
from support.devices import on_devices
from support.models import fp8_state
from support.stacks import stack, train


def synced_right(model: nn.Module, layers: list[Float8Linear] | None = None) -> None:
    """Train and sync; every layer's own buffers must have taken the step's amaxes."""
    train(model)
    every = [layer for layer in model.modules() if isinstance(layer, Float8Linear)]
    buffers, synced = fp8_state(model), every if layers is None else layers
    amaxes = {layer: layer.fp8_amax_input.item() for layer in every}
    assert all(amax > 0 for amax in amaxes.values())
    sync_float8_amax_and_scale_history(model, layers)
    for layer in every:
        if layer in synced:
            assert layer.fp8_amax_history_input[0].item() == amaxes[layer]
        assert layer.fp8_amax_input.item() == (0 if layer in synced else amaxes[layer])
    assert all(buffer is buffers[name] for name, buffer in fp8_state(model).items())


@on_devices
@pytest.mark.parametrize(
    "change", ["to-dtype", "load", "load-assign", "reset", "new-layer", "to_empty"]
)
def test_sync_updates_the_layers_own_buffers_after(device: str, change: str) -> None:
    model = stack(3, device)
    synced_right(model)
    if change == "to-dtype":
        model.to(torch.bfloat16)
    elif change.startswith("load"):
        state = copy.deepcopy(model.state_dict())
        model.load_state_dict(state, assign=change == "load-assign")
    elif change == "reset":
        model[1].reset_parameters()
    elif change == "new-layer":
        model.append(Float8Linear(16, 16, device=device, config=delayed()))
    elif change == "to_empty":
        model.to_empty(device=device)
        for layer in model:
            layer.reset_parameters()
    synced_right(model)


@pytest.mark.gpu
def test_sync_updates_the_layers_own_buffers_after_moving() -> None:
    model = stack(3, "cpu")
    synced_right(model)
    for device in ("cuda", "cpu", "cuda"):
        synced_right(model.to(device))


def test_syncing_a_part_between_syncs_of_the_whole() -> None:
    model = stack(3)
    synced_right(model)
    synced_right(model, [model[0], model[2]])
    sync_float8_amax_and_scale_history(model)
    synced_right(model[:2])
    synced_right(model)


def test_a_copy_and_its_original_are_synced_apart() -> None:
    model = stack(2)
    synced_right(model)
    clone = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in fp8_state(clone).items()}
    synced_right(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in fp8_state(clone).items())
    synced_right(clone)


@on_devices
def test_sync_takes_a_compiled_model(device: str) -> None:
    model = stack(2, device)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        synced_right(compiled)


def test_shared_layers_are_synced_once() -> None:
    linear = nn.Linear(16, 16)
    model = convert_to_float8_training(nn.Sequential(linear, nn.ReLU(), linear), config=delayed())
    train(model)
    peak = model[0].fp8_amax_input.item()
    sync_float8_amax_and_scale_history(model)
    assert model[0].fp8_amax_history_input.tolist() == [peak] + [0.0] * 15
