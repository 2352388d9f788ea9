"""Noticing that a sync of delayed scaling is missing, without false alarms."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.optim import optimizer as hooked

from float8 import (
    attach_to_optimizer,
    convert_to_float8_training,
    forget_float8_amax,
    sync_float8_amax_and_scale_history,
)
from support.configs import tensorwise
from support.devices import on_devices
from support.models import fp8_state, seeded
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


# ---------------------------------------------------------------- how it is noticed


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_step_is_noticed_whatever_the_optimizer(kind, foreach: bool) -> None:
    model = stack(2)
    train(model)
    kind(model.parameters(), lr=0.1, foreach=foreach).step()
    with pytest.raises(RuntimeError, match=MISSING):
        train(model)


def fused(model: nn.Module) -> None:
    torch.optim.AdamW(model.parameters(), fused=True).step()


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


@pytest.mark.parametrize("write", [fused, through_data])
def test_what_counts_no_versions_is_not_noticed(write) -> None:
    """A limit, which the docstring of `check_synced` names."""
    model = stack(1)
    train(model)
    write(model)
    train(model)


def test_compiled_code_does_not_notice_and_does_not_mind() -> None:
    """As long as no sync came, it scales by its data."""
    model = stack(1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = optimizer_of(model)
    for step in range(3):
        train(compiled, step)
        optimizer.step()
        assert model[0].fp8_scale_input.item() == 0


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def load(model: nn.Module) -> None:
    model.load_state_dict(stack(2).state_dict())


def new_parameters(model: nn.Module) -> None:
    for layer in model:
        layer.weight = nn.Parameter(2 * layer.weight.detach())


def evaluate_others(model: nn.Module) -> None:
    with torch.no_grad():
        by_hand(model)
        model.eval()(seeded(0, 4, 16))
        model.train()


ACTS = [by_hand, load, new_parameters, evaluate_others, lambda model: model.to(torch.bfloat16)]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("when", ["before", "after a sync"])
def test_other_writes_are_no_missing_sync(act, when: str) -> None:
    model = stack(2)
    if when == "after a sync":
        train(model)
        sync_float8_amax_and_scale_history(model)
    act(model)
    train(model)


@pytest.mark.parametrize("act", [load, new_parameters, lambda model: model.to(torch.bfloat16)])
def test_other_weights_between_two_forwards_are_no_missing_sync(act) -> None:
    model = stack(2)
    train(model)
    act(model)
    train(model)


def test_functional_calls_with_weights_of_their_own() -> None:
    model = stack(2)
    for factor in range(1, 6):
        weights = {name: factor * p for name, p in model.named_parameters()}
        weights["0.weight"].add_(1)
        torch.func.functional_call(model, weights, (seeded(0, 4, 16),)).sum().backward()


def test_forgotten_amaxes_need_no_sync() -> None:
    model = stack(2)
    train(model)
    optimizer_of(model).step()
    forget_float8_amax(model)
    assert not any(buffer.any() for buffer in fp8_state(model).values())
    train(model)


def test_forget_takes_modules_only() -> None:
    with pytest.raises(TypeError, match=r"model: got list, expected an nn.Module"):
        forget_float8_amax([])


def test_threads_may_convert_and_step_at_once() -> None:
    def work(seed: int) -> int:
        for _ in range(20):
            model = stack(2)
            optimizer = optimizer_of(model)
            attach_to_optimizer(model, optimizer)
            for step in range(3):
                train(model, seed + step)
                optimizer.step()
        return int((model[0].fp8_amax_history_input > 0).sum())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [3] * 4


def test_no_global_hooks() -> None:
    before = (
        dict(hooked._global_optimizer_pre_hooks),
        dict(hooked._global_optimizer_post_hooks),
    )
    model = stack(2)
    attach_to_optimizer(model, optimizer_of(model))
    train(model)
    assert before == (
        dict(hooked._global_optimizer_pre_hooks),
        dict(hooked._global_optimizer_post_hooks),
    )
