"""Noticing that a sync of delayed scaling is missing, without false alarms."""

import copy

import pytest
import torch
from torch import nn

from float8 import (
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import tensorwise
from support.devices import on_devices
from support.models import seeded
from support.stacks import MISSING, optimizer_of, stack, train


@on_devices
def test_a_step_without_a_sync_makes_the_next_forward_raise(device: str) -> None:
    model = stack(2, device)
    optimizer = optimizer_of(model)
    train(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match=MISSING):
        train(model)
    sync_float8_amax_and_scale_history(model)  # late, but before the forward: fine again
    train(model)


def test_the_message_also_names_attach_to_optimizer() -> None:
    model = stack(1)
    train(model)
    optimizer_of(model).step()
    with pytest.raises(RuntimeError, match=r"attach_to_optimizer\(model, optimizer\)"):
        train(model)


@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_a_sync_before_or_after_the_step_is_fine(when: str) -> None:
    model = stack(2)
    optimizer = optimizer_of(model)
    for _ in range(3):
        train(model)
        if when == "before the step":
            sync_float8_amax_and_scale_history(model)
        optimizer.step()
        if when == "after the step":
            sync_float8_amax_and_scale_history(model)


def test_gradient_accumulation_does_not_raise() -> None:
    model = stack(2)
    optimizer = optimizer_of(model)
    for _ in range(2):
        for microbatch in range(3):
            train(model, microbatch)
        sync_float8_amax_and_scale_history(model)
        optimizer.step()
        optimizer.zero_grad()


def test_it_raises_with_gradients_alone_whatever_the_mode() -> None:
    """A forward without gradients records nothing; one with gradients does, in `eval()` too."""
    model = stack(2)
    train(model)
    optimizer_of(model).step()
    for mode in (model.eval, model.train):
        mode()
        with torch.no_grad():
            model(seeded(0, 4, 16))
        with pytest.raises(RuntimeError, match=MISSING):
            model(seeded(0, 4, 16))


def test_switched_off_it_never_raises() -> None:
    model = stack(2, enable_pre_and_post_forward=False)
    optimizer = optimizer_of(model)
    for _ in range(3):
        train(model)
        optimizer.step()


def test_an_optimizer_of_other_parameters_does_not_matter() -> None:
    model, other = stack(2), nn.Linear(4, 4)
    train(model)
    other(torch.ones(1, 4)).sum().backward()
    optimizer_of(other).step()
    train(model)


def test_dynamic_layers_never_raise() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=tensorwise())
    optimizer = optimizer_of(model)
    for _ in range(3):
        train(model)
        optimizer.step()


@pytest.mark.parametrize("how", ["deepcopy", "convert", "load"])
def test_a_missing_sync_is_noticed_in_copies_too(how: str) -> None:
    model = stack(2)
    train(model)
    sync_float8_amax_and_scale_history(model)
    if how == "deepcopy":
        model = copy.deepcopy(model)
    elif how == "convert":
        model.to(torch.bfloat16)
    else:
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model)
    optimizer_of(model).step()
    with pytest.raises(RuntimeError, match=MISSING):
        train(model)


@pytest.mark.parametrize("how", ["deepcopy", "convert", "load"])
def test_copying_or_loading_alone_is_no_missing_sync(how: str) -> None:
    model = stack(2)
    train(model)
    sync_float8_amax_and_scale_history(model)
    if how == "deepcopy":
        model = copy.deepcopy(model)
    elif how == "convert":
        model.to(torch.bfloat16)
    else:
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer_of(model).step()  # steps with no gradients: no amax was recorded
    train(model)


# ---------------------------------------------------------------- frozen weights, two models


@pytest.mark.parametrize("trained", ["bias", "adapter"])
def test_a_missing_sync_is_noticed_by_any_parameter_of_the_layer(trained: str) -> None:
    model = stack(1)
    model.requires_grad_(False)
    layer = model[0]
    if trained == "bias":
        layer.bias.requires_grad_()
    else:
        layer.adapter = nn.Linear(16, 16)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    x = seeded(0, 4, 16).requires_grad_()
    (model(x) + (layer.adapter(x) if trained == "adapter" else 0)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=MISSING):
        model(x)
    sync_float8_amax_and_scale_history(model)
    model(x)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_two_models_with_two_optimizers_do_not_raise(first: str, freeze: bool) -> None:
    """Each runs through the other, and is synced at its own steps alone."""
    generator, discriminator = stack(2), stack(2)
    optimizers = {
        "generator": optimizer_of(generator),
        "discriminator": optimizer_of(discriminator),
    }
    attach_to_optimizer(generator, optimizers["generator"])
    attach_to_optimizer(discriminator, optimizers["discriminator"])
    turns = sorted(optimizers, reverse=first == "generator")
    for step in range(6):
        turn = turns[step % 2]
        z = seeded(step, 4, 16)
        if freeze:
            discriminator.requires_grad_(turn == "discriminator")
        fake = generator(z)
        fake = fake.detach() if turn == "discriminator" else fake
        discriminator(fake).sum().backward()
        optimizers[turn].step()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
