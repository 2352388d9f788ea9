"""`attach_to_optimizer`: a sync at every step of an optimizer."""

import copy

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import delayed, tensorwise
from support.devices import on_devices
from support.models import FeedForward, fp8_state, seeded
from support.stacks import MISSING, optimizer_of, stack, train


@on_devices
def test_attach_to_optimizer_syncs_at_every_step(device: str) -> None:
    model, other = stack(2, device), None
    other = copy.deepcopy(model)
    optimizer, others = optimizer_of(model), optimizer_of(other)
    attach_to_optimizer(model, optimizer)
    for step in range(4):
        train(model, step)
        optimizer.step()
        train(other, step)
        sync_float8_amax_and_scale_history(other)
        others.step()
    states = fp8_state(model), fp8_state(other)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.equal(model[0].weight, other[0].weight)


def test_the_handle_detaches() -> None:
    model = stack(2)
    optimizer = optimizer_of(model)
    handle = attach_to_optimizer(model, optimizer)
    train(model)
    optimizer.step()
    handle.remove()
    train(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match=MISSING):
        train(model)


def test_attach_to_optimizer_is_harmless_without_delayed_scaling() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=tensorwise())
    optimizer = optimizer_of(model)
    attach_to_optimizer(model, optimizer)
    for _ in range(2):
        train(model)
        optimizer.step()


@on_devices
def test_training_with_attached_sync_lowers_the_loss(device: str) -> None:
    model = FeedForward(32, 64).to(device)
    convert_to_float8_training(model, config=delayed())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attach_to_optimizer(model, optimizer)
    x, y = seeded(0, 64, 32, device=device), seeded(1, 64, 32, device=device)
    losses: list[float] = []
    for _ in range(40):
        loss: Tensor = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@on_devices
@pytest.mark.parametrize("how", ["twice", "two-optimizers", "sync-too"])
def test_more_syncs_than_one_per_step_leave_the_same_state(device: str, how: str) -> None:
    model = stack(2, device)
    other = copy.deepcopy(model)
    optimizer = optimizer_of(other)
    attach_to_optimizer(other, optimizer)
    if how == "two-optimizers":
        optimizers = [optimizer_of(layer) for layer in model]
        for part in optimizers:
            attach_to_optimizer(model, part)
    else:
        optimizers = [optimizer_of(model)]
        attach_to_optimizer(model, optimizers[0])
        if how == "twice":
            attach_to_optimizer(model, optimizers[0])
    for step in range(3):
        train(model, step)
        train(other, step)
        if how == "sync-too":
            sync_float8_amax_and_scale_history(model)
        for part in (*optimizers, optimizer):
            part.step()
    states = fp8_state(model), fp8_state(other)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert int((model[0].fp8_amax_history_input > 0).sum()) == 3


def test_arguments_of_a_wrong_type() -> None:
    model = stack(1)
    optimizer = optimizer_of(model)
    with pytest.raises(TypeError, match=r"model: got SGD, expected an nn.Module"):
        attach_to_optimizer(optimizer, model)
    with pytest.raises(TypeError, match=r"optimizer: got list, expected a torch.optim.Optimizer"):
        attach_to_optimizer(model, [optimizer])
