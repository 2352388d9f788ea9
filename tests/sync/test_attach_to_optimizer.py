"""`attach_to_optimizer`: a sync at every step of an optimizer."""

import copy
import gc
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    convert_to_high_precision,
    sync_float8_amax_and_scale_history,
)
from support.configs import delayed
from support.devices import on_devices
from support.models import seeded
from support.stacks import MISSING, optimizer_of, stack, train


def steps_seen(model: nn.Module) -> int:
    """The optimizer steps in the history of the first layer."""
    return int((model[0].fp8_amax_history_input > 0).sum())


def assert_same_state(model: nn.Module, other: nn.Module) -> None:
    """Weights, and buffers of delayed scaling."""
    states = model.state_dict(), other.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@on_devices
@pytest.mark.parametrize("how", ["once", "twice", "two-optimizers", "sync-too"])
def test_each_step_is_one_sync(device: str, how: str) -> None:
    model = stack(2, device)
    other = copy.deepcopy(model)
    others, optimizers = optimizer_of(other), [optimizer_of(model)]
    if how == "two-optimizers":
        optimizers = [optimizer_of(layer) for layer in model]
    for optimizer in [*optimizers, *(optimizers if how == "twice" else ())]:
        attach_to_optimizer(model, optimizer)
    for step in range(3):
        train(model, step)
        if how == "sync-too":
            sync_float8_amax_and_scale_history(model)
        for optimizer in optimizers:
            optimizer.step()
        train(other, step)
        sync_float8_amax_and_scale_history(other)
        others.step()
    assert_same_state(model, other)
    assert steps_seen(model) == 3


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


def test_an_attachment_outlives_the_way_back() -> None:
    """It writes nothing on layers in high precision, which can be converted again."""
    model = stack(1)
    optimizer = optimizer_of(model)
    attachment = attach_to_optimizer(model, optimizer)
    train(model)
    optimizer.step()
    convert_to_high_precision(model)
    attachment.remove()
    optimizer.step()
    convert_to_float8_training(model, config=delayed(), module_filter_fn=all_linears)
    train(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match=MISSING):
        train(model)


def test_of_two_attachments_one_is_left() -> None:
    """A layer checks for missing syncs again when the last is gone, or its optimizer is."""
    model = stack(1)
    optimizers = [optimizer_of(model) for _ in "ab"]
    attachment, _ = (attach_to_optimizer(model, each) for each in optimizers)
    attachment.remove()
    attachment.remove()  # once more changes nothing
    first, _ = optimizers
    for _ in range(2):
        train(model)
        first.step()
    optimizers.clear()
    gc.collect()
    train(model)
    first.step()
    with pytest.raises(RuntimeError, match=MISSING):
        train(model)


def test_arguments_of_a_wrong_type() -> None:
    model = stack(1)
    optimizer = optimizer_of(model)
    with pytest.raises(TypeError, match=r"model: got SGD, expected an nn.Module"):
        attach_to_optimizer(optimizer, model)
    endless = SimpleNamespace()
    endless.optimizer = endless
    wrong = ([optimizer], None, SimpleNamespace(optimizer=SimpleNamespace(optimizer=3)), endless)
    for each in wrong:
        name = type(each).__name__
        with pytest.raises(TypeError, match=rf"optimizer: got {name}, expected a torch.optim.Opt"):
            attach_to_optimizer(model, each)


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
        assert_same_state(model, other)
    assert steps_seen(model) == 4


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
        assert steps_seen(model) == step


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
        assert steps_seen(model) == step + 1


class Wrapper:
    """An optimizer by what it does: those of accelerate are in `tests/peers`."""

    def __init__(self, optimizer, name: str) -> None:
        setattr(self, name, optimizer)
        self.inner = optimizer

    def step(self, *args, **kwargs) -> None:
        self.inner.step(*args, **kwargs)


@pytest.mark.parametrize("names", [["base_optimizer"], ["optimizer"] * 3])
def test_wrapped_optimizers(names: list[str]) -> None:
    model = stack(2)
    optimizer = optimizer_of(model)
    for name in names:
        optimizer = Wrapper(optimizer, name)
    handle = attach_to_optimizer(model, optimizer)
    for step in range(3):
        train(model, step)
        optimizer.step()
    assert steps_seen(model) == 3
    handle.remove()
    train(model)
    optimizer.step()
    assert steps_seen(model) == 3
