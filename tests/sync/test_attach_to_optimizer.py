"""`attach_to_optimizer`: a sync at every step of an optimizer; noticing that a sync is missing."""

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
    convert_to_high_precision,
    forget_float8_amax,
    sync_float8_amax_and_scale_history,
)
from sqnr import assert_same_bits
from support.configs import delayed, tensorwise
from support.devices import on_devices
from support.errors import require_errors
from support.models import fp8_state, seeded
from support.modes import running
from support.stacks import MISSING, optimizer_of, stack, train


def steps_seen(model: nn.Module) -> int:
    """The optimizer steps in the history of the first layer."""
    return int((model[0].fp8_amax_history_input > 0).sum())


def attached(layers: int = 2) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A model, its optimizer, and the attachment."""
    model = stack(layers)
    optimizer = optimizer_of(model)
    return model, optimizer, attach_to_optimizer(model, optimizer)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds or [0]:
        train(model, seed)
        optimizer.step()


def assert_missing(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=MISSING):
        train(model)


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
    assert_same_bits(model.state_dict(), other.state_dict())
    assert steps_seen(model) == 3


def test_an_attachment_outlives_the_way_back() -> None:
    """It writes nothing on layers in high precision, which can be converted again."""
    model, optimizer, attachment = attached(1)
    steps(model, optimizer)
    convert_to_high_precision(model)
    attachment.remove()
    optimizer.step()
    convert_to_float8_training(model, config=delayed(), module_filter_fn=all_linears)
    steps(model, optimizer)
    assert_missing(model)


def test_of_two_attachments_one_is_left() -> None:
    """A layer checks for missing syncs again when the last is gone, or its optimizer is."""
    model = stack(1)
    optimizers = [optimizer_of(model) for _ in "ab"]
    attachments = [attach_to_optimizer(model, each) for each in optimizers]
    for _ in "ab":  # once more changes nothing
        attachments[0].remove()
    first = optimizers[0]
    steps(model, first, 0, 0)
    optimizers.clear()
    gc.collect()
    steps(model, first)
    assert_missing(model)


def test_arguments_of_a_wrong_type() -> None:
    model, endless = stack(1), SimpleNamespace()
    optimizer, endless.optimizer = optimizer_of(model), endless
    attach, expected = attach_to_optimizer, "expected a torch.optim.Opt"
    within = SimpleNamespace(optimizer=SimpleNamespace(optimizer=3))
    require_errors(
        ("TypeError: model: got SGD, expected an nn.Module", attach, (optimizer, model)),
        *(
            (f"TypeError: optimizer: got {type(x).__name__}, {expected}", attach, (model, x))
            for x in ([optimizer], None, within, endless)
        ),
    )


def microbatch(model: nn.Module, seed: int) -> Tensor:
    loss: Tensor = model(seeded(seed, 4, 16)).square().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("how", ["argument", "keyword"])
def test_a_closure_is_of_the_step_that_runs_it(how: str) -> None:
    """As Lightning does it: microbatches before the last one run their closure without a step."""
    model, optimizer, _ = attached()
    other = copy.deepcopy(model)
    others = optimizer_of(other)
    for step in range(4):
        batches = range(10 * step, 10 * step + 3)
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
        assert_same_bits(model.state_dict(), other.state_dict())
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
    steps(model, optimizer, 0, 1, 2)
    assert steps_seen(model) == 3
    handle.remove()
    steps(model, optimizer)
    assert steps_seen(model) == 3


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
    expected = r"the optimizer stepped, .* not synced(.|\n)*attach_to_optimizer\(model, optimizer\)"
    with pytest.raises(RuntimeError, match=expected):
        train(model)
    sync_float8_amax_and_scale_history(model)  # late, but before the forward: fine again
    train(model)


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_is_noticed_whatever_writes_the_weights(
    how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # by another test
    model = stack(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    steps(model, optimizer)
    if "fused" in how:  # no version counter tells of these: new gradients do
        optimizer.zero_grad()
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
    steps(model, optimizer_of(model))
    assert_missing(model)


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


CHANGES = [load, new_parameters, nn.Module.bfloat16]
ACTS = [*CHANGES, by_hand, evaluate_others]
WHEN = {"before": ACTS, "after a sync": ACTS, "between two forwards": CHANGES}
"""Between two forwards other acts look like a step."""


@pytest.mark.parametrize("when", WHEN)
def test_other_writes_are_no_missing_sync(when: str) -> None:
    for act in WHEN[when]:
        model = stack(2)
        if when != "before":
            train(model)
        if when == "after a sync":
            sync_float8_amax_and_scale_history(model)
        act(model)
        train(model)


@pytest.mark.xdist_group("compilers")
def test_where_nothing_is_checked_nothing_raises() -> None:
    """Nor where functional calls bring weights of their own, nor in compiled code."""
    model = stack(1)
    steps(running(model, "aot_eager"), optimizer_of(model), 0, 1, 2)
    assert model[0].fp8_scale_input.item() == 0  # it scales by its data, as long as no sync came
    dynamic = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=tensorwise())
    for model in (stack(2, enable_pre_and_post_forward=False), dynamic):
        steps(model, optimizer_of(model), 0, 0, 0)
    model = stack(2)
    for factor in range(1, 6):
        weights = {name: factor * p for name, p in model.named_parameters()}
        weights["0.weight"].add_(1)
        torch.func.functional_call(model, weights, (seeded(0, 4, 16),)).sum().backward()


def test_forgotten_amaxes_need_no_sync() -> None:
    model = stack(2)
    steps(model, optimizer_of(model))
    forget_float8_amax(model)
    assert not any(buffer.any() for buffer in fp8_state(model).values())
    train(model)
    with pytest.raises(TypeError, match=r"model: got list, expected an nn.Module"):
        forget_float8_amax([])


def test_threads_may_convert_and_step_at_once() -> None:
    def work(seed: int) -> int:
        for _ in range(4):
            model, optimizer, _ = attached()
            steps(model, optimizer, seed, seed + 1, seed + 2)
        return steps_seen(model)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [3] * 4
