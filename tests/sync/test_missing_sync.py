"""Noticing that a sync of delayed scaling is missing, without false alarms."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

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


def assert_missing(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=MISSING):
        train(model)


@on_devices
def test_a_step_without_a_sync_makes_the_next_forward_raise(device: str) -> None:
    """A forward without gradients records nothing; one with gradients does, in `eval()` too."""
    model = stack(2, device)
    train(model)
    optimizer_of(model).step()
    for mode in (model.eval, model.train):
        mode()
        with torch.no_grad():
            model(seeded(0, 4, 16, device=device))
        assert_missing(model)
    with pytest.raises(RuntimeError, match=r"attach_to_optimizer\(model, optimizer\)"):
        train(model)
    sync_float8_amax_and_scale_history(model)  # late, but before the forward: fine again
    train(model)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_is_noticed_whatever_the_optimizer(kind, foreach: bool) -> None:
    model = stack(2)
    train(model)
    kind(model.parameters(), lr=0.1, foreach=foreach).step()
    assert_missing(model)


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


def load(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return model


COPIES: list[Callable[[nn.Module], nn.Module]] = [copy.deepcopy, nn.Module.bfloat16, load]


@pytest.mark.parametrize("copied", COPIES)
def test_a_missing_sync_is_noticed_in_copies_too(copied) -> None:
    model = stack(2)
    train(model)
    sync_float8_amax_and_scale_history(model)
    model = copied(model)
    optimizer_of(model).step()  # steps with no gradients: no amax was recorded
    train(model)
    optimizer_of(model).step()
    assert_missing(model)


@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_a_sync_before_or_after_the_step_is_fine(when: str) -> None:
    model = stack(2)
    optimizer = optimizer_of(model)
    for _ in range(3):
        for microbatch in range(2):
            train(model, microbatch)
        if when == "before the step":
            sync_float8_amax_and_scale_history(model)
        optimizer.step()
        if when == "after the step":
            sync_float8_amax_and_scale_history(model)


def test_where_nothing_is_checked_nothing_raises() -> None:
    dynamic = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=tensorwise())
    for model in (stack(2, enable_pre_and_post_forward=False), dynamic):
        optimizer = optimizer_of(model)
        for _ in range(3):
            train(model)
            optimizer.step()


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_two_models_with_two_optimizers_do_not_raise(first: str, freeze: bool) -> None:
    """Each runs through the other, and is synced at its own steps alone."""
    models = {"generator": stack(2), "discriminator": stack(2)}
    generator, discriminator = models.values()
    optimizers = {name: optimizer_of(model) for name, model in models.items()}
    for name, model in models.items():
        attach_to_optimizer(model, optimizers[name])
    turns = sorted(optimizers, reverse=first == "generator")
    for step in range(6):
        turn = turns[step % 2]
        if freeze:
            discriminator.requires_grad_(turn == "discriminator")
        fake = generator(seeded(step, 4, 16))
        fake = fake.detach() if turn == "discriminator" else fake
        discriminator(fake).sum().backward()
        optimizers[turn].step()
        for optimizer in optimizers.values():
            optimizer.zero_grad()


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


def new_parameters(model: nn.Module) -> None:
    for layer in model:
        layer.weight = nn.Parameter(2 * layer.weight.detach())


def evaluate_others(model: nn.Module) -> None:
    with torch.no_grad():
        by_hand(model)
        model.eval()(seeded(0, 4, 16))
        model.train()


OTHERS = [load, new_parameters, nn.Module.bfloat16]


@pytest.mark.parametrize("act", [*OTHERS, by_hand, evaluate_others])
@pytest.mark.parametrize("when", ["before", "after a sync", "between two forwards"])
def test_other_writes_are_no_missing_sync(act, when: str) -> None:
    if when == "between two forwards" and act not in OTHERS:
        pytest.skip("looks like a step")
    model = stack(2)
    if when != "before":
        train(model)
    if when == "after a sync":
        sync_float8_amax_and_scale_history(model)
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
