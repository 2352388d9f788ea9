"""State is plain tensors: others save, average and edit it; a sync updates those of now."""

import copy
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from float8 import (
    Float8Linear,
    Float8Weights,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
    update_float8_weights,
)
from sqnr import assert_same_bits
from support.configs import DELAYED, DYNAMIC, delayed, mixed, tensorwise
from support.devices import on_devices
from support.models import copied, fp8_state, gradients, seeded
from support.modes import running
from support.rings import short
from support.stacks import optimizer_of, stack, train

X = 100 * seeded(7, 8, 16)
"""Far from what the histories know."""


def trained(model: nn.Module) -> nn.Module:
    """After two steps, and with amaxes that are not synced."""
    optimizer = optimizer_of(model)
    for step in range(2):
        train(model, step)
        sync_float8_amax_and_scale_history(model)
        optimizer.step()
        optimizer.zero_grad()
    train(model, 2)
    return model


def dynamic(model: nn.Module) -> nn.Module:
    """A copy that scales by its data."""
    twin = convert_to_float8_training(copy.deepcopy(model), config=tensorwise())
    assert not fp8_state(twin)
    return twin


def own_storages(tensors: dict[str, torch.Tensor]) -> bool:
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    return len(places) == len(tensors) and all(
        tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors.values()
    )


def loaded(model: nn.Module, assign: bool) -> nn.Module:
    """From tensors that lie in one storage."""
    state = model.state_dict()
    views = iter(
        torch.cat([x.flatten() for x in state.values()]).split([x.numel() for x in state.values()])
    )
    packed = {name: next(views).view(x.shape) for name, x in state.items()}
    other = stack(2)
    other.load_state_dict(packed, assign=assign)
    return other


WAYS = {
    "sync": lambda model: model,
    "deepcopy": copy.deepcopy,
    "dtype": lambda model: model.bfloat16(),
    "load": lambda model: loaded(model, False),
    "assign": lambda model: loaded(model, True),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_buffer_has_its_own_storage(way: str) -> None:
    model = WAYS[way](trained(stack(2)))
    assert own_storages(fp8_state(model))
    sync_float8_amax_and_scale_history(model)
    assert own_storages(fp8_state(model))
    if way != "assign":  # Parameters are what they were assigned
        assert own_storages(model.state_dict())


def test_a_sync_in_inference_mode_leaves_state_that_trains() -> None:
    model = trained(stack(2))
    other = copy.deepcopy(model)
    with torch.inference_mode():
        sync_float8_amax_and_scale_history(model)
    sync_float8_amax_and_scale_history(other)
    for each in (model, other):
        train(each, 5)
    assert not any(buffer.is_inference() for buffer in model.buffers())
    assert_same_bits(fp8_state(model), fp8_state(other))


def merged(model: nn.Module) -> nn.Module:
    """As of an adapter, or surgery."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(50)
    return model


def averaged(model: nn.Module) -> nn.Module:
    """With a state that was never synced: scales become a mean with the sentinel."""
    average = AveragedModel(stack(2), use_buffers=True)
    for _ in range(2):
        average.update_parameters(model)
    return average.module


def never_synced(model: nn.Module) -> nn.Module:
    return stack(2, enable_amax_init=False)


def held(model: nn.Module) -> nn.Module:
    config = mixed(DELAYED, DYNAMIC, DELAYED, float8_weights=Float8Weights.HELD)
    trained(convert_to_float8_training(model, config=config))
    update_float8_weights(model)
    return model


def partly_delayed(model: nn.Module) -> nn.Module:
    model = convert_to_float8_training(stack(2), config=mixed(DELAYED, DYNAMIC, DELAYED))
    return trained(model)


CHANGES = [lambda model: model, copy.deepcopy, merged, averaged, never_synced, held, partly_delayed]


CONTEXTS = [(torch.no_grad, False), (torch.inference_mode, True)]
CONTEXTS += [(torch.no_grad, True), (torch.inference_mode, False)]


@pytest.mark.parametrize(("context", "training"), short({0, 1}, CONTEXTS))
@pytest.mark.parametrize("change", CHANGES)
def test_without_gradients_scaling_is_dynamic(change, context, training: bool) -> None:
    model = change(trained(stack(2))).train(training)
    twin, before = dynamic(model), copied(model)
    with context():
        for x in (X, X / 1000):
            assert torch.equal(model(x), twin(x))
    assert_same_bits(fp8_state(model), before)


@pytest.mark.parametrize("mode", short({"eager"}, ["eager", "aot_eager"]))
def test_the_history_is_taken_in_training_with_gradients_alone(mode: str) -> None:
    model = trained(stack(1))
    call = running(model, mode)
    for training in (True, False):
        model.train(training)
        for grad in (False, True):  # what records comes last
            before, wanted = copied(model), dynamic(model)(X)
            with torch.set_grad_enabled(grad):  # saturated in training
                assert torch.equal(call(X), wanted) is not (training and grad)
            if not grad:
                assert_same_bits(fp8_state(model), before)


class Distilled(nn.Module):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, nn.Linear(X.shape[-1], 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = self.teacher(x)
        return target, self.student(x)


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_a_teacher_beside_what_takes_gradients_scales_by_the_data(mode: str) -> None:
    """Compiled, both are one graph, which runs in an autograd function."""
    teacher = trained(stack(1))
    wanted = dynamic(teacher)(X)
    target, y = running(Distilled(teacher), mode)(X)
    assert torch.equal(target, wanted)
    assert y.requires_grad


@pytest.mark.parametrize(
    ("mode", "behind"),
    short({0, 1}, [("eager", True), ("eager", False), ("aot_eager", True)]),
)
def test_frozen_layers_scale_by_the_data_and_record(mode: str, behind: bool) -> None:
    """Nobody may sync them, as a critic or teacher."""
    model = trained(stack(1)).requires_grad_(False)
    twin, call = dynamic(model), running(model, mode)
    for factor in (1, 1e-3):
        results = []
        for run in (call, twin):
            x = (factor * X).requires_grad_(behind)
            results.append({"output": (y := run(x))})
            if behind:
                y.backward(X)
                results[-1]["input"] = x.grad
        assert_same_bits(*results)
    assert model[0].fp8_amax_input == X.abs().max()
    model[0].bias.requires_grad_(True)  # an optimizer steps it, and so syncs the layer
    assert not torch.equal(model(X), twin(X))


def first_frozen(model: nn.Module) -> nn.Module:
    model[0].requires_grad_(False)
    return model


def computed(model: nn.Module) -> nn.Module:
    """Computed weights require no gradient where none are taken."""
    for layer in model:
        nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    return model


REENTRANT = [(each, "eager") for each in (lambda model: model, first_frozen, computed)]


@pytest.mark.parametrize(
    ("change", "mode"), short(range(3), [*REENTRANT, (first_frozen, "aot_eager")])
)
def test_reentrant_checkpointing_has_the_scales_of_its_recomputation(change, mode: str) -> None:
    """Its first forward has no gradients, and values here that the history cuts."""
    model = change(trained(stack(2)))
    sync_float8_amax_and_scale_history(model)
    model.zero_grad()
    twin, outputs, results = copy.deepcopy(model), [], []
    call = running(model, mode)

    def recorded(x: torch.Tensor) -> torch.Tensor:
        outputs.append(call(x))
        return outputs[-1]

    for each, run in ((model, partial(checkpoint, recorded, use_reentrant=True)), (twin, twin)):
        x = X.clone().requires_grad_()
        y = run(x)
        y.backward(X)
        results.append({"output": y, "input": x.grad} | gradients(each) | fp8_state(each))
    assert torch.equal(*outputs)
    assert_same_bits(*results)


def synced_right(model: nn.Module, layers: list[Float8Linear] | None = None) -> None:
    """Train and sync; every layer's own buffers must have taken the step's amaxes."""
    train(model)
    every = [layer for layer in model.modules() if isinstance(layer, Float8Linear)]
    buffers, synced = fp8_state(model), every if layers is None else layers
    amaxes = {layer: layer.fp8_amax_input.item() for layer in every}
    recorded = {layer: int((layer.fp8_amax_history_input > 0).sum()) for layer in synced}
    assert all(amax > 0 for amax in amaxes.values())
    sync_float8_amax_and_scale_history(model, layers)
    for layer in every:
        if layer in synced:
            assert layer.fp8_amax_history_input[0].item() == amaxes[layer]
            assert int((layer.fp8_amax_history_input > 0).sum()) == recorded[layer] + 1
        assert layer.fp8_amax_input.item() == (0 if layer in synced else amaxes[layer])
    assert all(buffer is buffers[name] for name, buffer in fp8_state(model).items())


def load(model: nn.Module, assign: bool) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)


def empty(model: nn.Module) -> None:
    model.to_empty(device=model[0].weight.device)
    for layer in model:
        layer.reset_parameters()


EDITS = {
    "to-dtype": nn.Module.bfloat16,
    "load": partial(load, assign=False),
    "load-assign": partial(load, assign=True),
    "reset": lambda model: model[1].reset_parameters(),
    "new-layer": lambda m: m.append(
        Float8Linear(16, 16, device=m[0].weight.device, config=delayed())
    ),
    "to_empty": empty,
}


@on_devices
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_sync_updates_the_layers_own_buffers_after(device: str, edit) -> None:
    model = stack(3, device)
    synced_right(model)
    edit(model)
    synced_right(model)


@pytest.mark.gpu
def test_sync_updates_the_layers_own_buffers_after_moving() -> None:
    model = stack(3, "cpu")
    synced_right(model)
    for device in ("cuda", "cpu", "cuda"):
        synced_right(model.to(device))


def test_syncing_a_part_between_syncs_of_the_whole() -> None:
    model = stack(3)
    model.append(model[0])
    synced_right(model)
    synced_right(model, [model[0], model[2]])
    sync_float8_amax_and_scale_history(model)
    synced_right(model[:2])
    synced_right(model)


def test_what_is_no_step_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    model = stack(2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(3):
        for microbatch in range(2):
            train(model, 2 * step + microbatch)
        sync_float8_amax_and_scale_history(model)
        optimizer.step()
        optimizer.zero_grad()
    with monkeypatch.context() as patch:  # a first forward after a sync that fails is no step
        patch.setattr(torch.Tensor, "diagonal", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            model(X)
    train(model, 6)
    optimizer.zero_grad()  # a batch that is left out
    x = X.clone().requires_grad_()
    for _ in range(2):  # as for adversarial examples
        torch.autograd.grad(model(x).sum(), x)
    y = checkpoint(model, checkpoint(model, X, use_reentrant=False), use_reentrant=False)
    y.sum().backward()  # layers that are used twice run again within one backward
    model[0].weight.requires_grad_(False)
    optimizer.zero_grad()
    train(model, 7)
