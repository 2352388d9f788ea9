"""`attach_to_optimizer`: a sync at every step of an optimizer."""

import copy
from functools import partial
from types import SimpleNamespace

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
    for wrong in ([optimizer], None, SimpleNamespace(optimizer=SimpleNamespace(optimizer=3))):
        name = type(wrong).__name__
        with pytest.raises(TypeError, match=rf"optimizer: got {name}, expected a torch.optim.Opt"):
            attach_to_optimizer(model, wrong)
    endless = SimpleNamespace()
    endless.optimizer = endless
    with pytest.raises(TypeError, match=r"optimizer: got SimpleNamespace"):
        attach_to_optimizer(model, endless)


# ---------------------------------------------------------------- closures


def microbatch(model: nn.Module, seed: int) -> Tensor:
    loss: Tensor = model(seeded(seed, 4, 16)).square().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("how", ["argument", "keyword"])
def test_a_closure_is_of_the_step_that_runs_it(how: str, accumulated: int) -> None:
    """As Lightning does it: microbatches before the last one run their closure without a step."""
    model = stack(2)
    other = copy.deepcopy(model)
    optimizer, others = optimizer_of(model), optimizer_of(other)
    attach_to_optimizer(model, optimizer)
    for step in range(4):
        batches = range(10 * step, 10 * step + accumulated)
        losses = [microbatch(model, seed) for seed in batches[:-1]]
        closure = partial(microbatch, model, batches[-1])
        losses.append(
            optimizer.step(closure) if how == "argument" else optimizer.step(closure=closure)
        )
        optimizer.zero_grad()
        wanted = [microbatch(other, seed) for seed in batches]
        sync_float8_amax_and_scale_history(other)
        others.step()
        others.zero_grad()
        assert torch.equal(torch.stack(losses), torch.stack(wanted))
        states = model.state_dict(), other.state_dict()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert int((model[0].fp8_amax_history_input > 0).sum()) == 4


def test_a_closure_called_several_times_is_one_step_with_one_scale() -> None:
    model = stack(2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=5)
    attach_to_optimizer(model, optimizer)
    amaxes: list[float] = []
    scales: set[float] = set()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = microbatch(model, 3)
        amaxes.append(model[1].weight.abs().max().item())
        scales.add(model[1].fp8_scale_weight.item())
        return loss

    for step in range(1, 4):
        amaxes.clear()
        scales.clear()
        optimizer.step(closure)
        assert len(amaxes) > 1
        assert len(scales) == 1
        assert model[1].fp8_amax_history_weight[0].item() == max(amaxes)
        assert int((model[1].fp8_amax_history_weight > 0).sum()) == step


def test_a_closure_of_an_optimizer_that_moves_the_weights_first() -> None:
    class Sharpness(torch.optim.Optimizer):
        """SAM: gradients of this step are taken elsewhere."""

        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base_optimizer = base
            super().__init__(base.param_groups, {})

        @torch.no_grad()
        def step(self, closure) -> None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            torch._foreach_add_(parameters, 0.1)
            with torch.enable_grad():
                closure()
            torch._foreach_sub_(parameters, 0.1)
            self.base_optimizer.step()

    model = stack(2)
    optimizer = Sharpness(optimizer_of(model))
    attach_to_optimizer(model, optimizer)
    for step in range(3):
        train(model, step)
        optimizer.step(partial(train, model, step))
        assert int((model[0].fp8_amax_history_input > 0).sum()) == step + 1


# ---------------------------------------------------------------- wrapped optimizers


class Wrapper:
    def __init__(self, optimizer, name: str) -> None:
        setattr(self, name, optimizer)
        self.inner = optimizer

    def step(self, *args, **kwargs) -> None:
        self.inner.step(*args, **kwargs)


class ByName(torch.optim.Optimizer, Wrapper):
    """An optimizer without an optimizer's hooks, as accelerate's is."""

    def __init__(self, optimizer, name: str) -> None:
        Wrapper.__init__(self, optimizer, name)

    def step(self, closure=None) -> None:
        self.inner.step(closure)


@pytest.mark.parametrize("kind", [Wrapper, ByName])
@pytest.mark.parametrize("names", [["optimizer"], ["base_optimizer"], ["optimizer"] * 3])
def test_wrapped_optimizers(kind, names: list[str]) -> None:
    if kind is ByName:
        names = ["optimizer" for _ in names]
    model = stack(2)
    optimizer = optimizer_of(model)
    for name in names:
        optimizer = kind(optimizer, name)
    handle = attach_to_optimizer(model, optimizer)
    for step in range(3):
        train(model, step)
        optimizer.step()
    assert int((model[0].fp8_amax_history_input > 0).sum()) == 3
    handle.remove()
    train(model)
    optimizer.step()
    assert int((model[0].fp8_amax_history_input > 0).sum()) == 3


def test_a_step_compiled_with_its_hooks() -> None:
    model = stack(2)
    optimizer = optimizer_of(model)
    attach_to_optimizer(model, optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for seed in range(3):
        train(model, seed)
        step()
    assert int((model[0].fp8_amax_history_input > 0).sum()) == 3
