"""State is plain tensors: others save, average and edit it; evaluation does not depend on it."""

import copy

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

from float8 import (
    Float8Linear,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
    update_float8_weights,
)
from support.configs import MIXES, delayed, mixed, tensorwise
from support.microbatches import with_weights
from support.models import FeedForward, fp8_state, seeded
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
    twin = copy.deepcopy(model)
    for name, layer in list(twin.named_modules()):
        if isinstance(layer, Float8Linear):
            parent, _, child = name.rpartition(".")
            setattr(twin.get_submodule(parent), child, Float8Linear.from_float(layer, tensorwise()))
    assert not fp8_state(twin)
    return twin


def own_storages(tensors: dict[str, torch.Tensor]) -> bool:
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    return len(places) == len(tensors) and all(
        tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors.values()
    )


# ---------------------------------------------------------------- storage


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


def test_two_models_with_one_assigned_state_train_apart() -> None:
    model, other = trained(stack(2)), stack(2)
    other.load_state_dict(model.state_dict(), assign=True)
    before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
    sync_float8_amax_and_scale_history(other)
    assert all(torch.equal(buffer, before[name]) for name, buffer in fp8_state(model).items())


def test_safetensors_saves_and_loads(tmp_path) -> None:
    model, other = trained(stack(2)), stack(2)
    save_model(model, str(tmp_path / "model.safetensors"))
    assert load_model(other, str(tmp_path / "model.safetensors")) == (set(), [])
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_subset_synced_between_syncs_of_the_whole_keeps_its_buffers() -> None:
    model = trained(stack(3))
    buffers = fp8_state(model)
    for layers in ([model[0], model[2]], None, [model[1]]):
        sync_float8_amax_and_scale_history(model, layers)
        assert all(buffer is buffers[name] for name, buffer in fp8_state(model).items())


# ---------------------------------------------------------------- evaluation


def untouched(model: nn.Module) -> nn.Module:
    return model


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


CHANGES = [untouched, merged, averaged, never_synced]


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_that_of_dynamic_scaling(how: str, change, context) -> None:
    model = change(trained(stack(2))).eval()
    twin = dynamic(model)
    before = {name: buffer.clone() for name, buffer in fp8_state(model).items()}
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
    with context():
        for x in (X, X / 1000):
            assert torch.equal(call(x), twin(x))
    assert all(torch.equal(buffer, before[name]) for name, buffer in fp8_state(model).items())


@pytest.mark.parametrize("mix", MIXES)
def test_evaluation_whatever_has_a_history(mix) -> None:
    model = convert_to_float8_training(FeedForward(16, 32), config=mixed(*mix))
    trained(model).eval()
    with torch.no_grad():
        assert torch.equal(model(X), dynamic(model)(X))


@pytest.mark.parametrize("updated", ["training", "evaluation"])
def test_evaluation_with_held_weights(updated: str) -> None:
    model = stack(2)
    convert_to_float8_training(model, config=with_weights(model[0].config))
    trained(model).train(updated == "training")
    update_float8_weights(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(X), dynamic(model)(X))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_mode_decides_whether_the_history_is_taken(
    training: bool, grad: bool, compiled: bool
) -> None:
    """The first forward of reentrant checkpointing has no gradients, its recomputation has."""
    model = trained(stack(2))
    model.train(training)
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with torch.set_grad_enabled(grad):
        assert torch.equal(call(X), dynamic(model)(X)) is not training  # saturated in training


def test_an_evaluation_between_microbatches_changes_nothing() -> None:
    models = [
        trained(stack(2, delayed_scaling_config=delayed().delayed_scaling_config)) for _ in "ab"
    ]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        models[0].eval()(X)
    models[0].train()
    for model in models:
        train(model, 3)
        sync_float8_amax_and_scale_history(model)
    states = [fp8_state(model) for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_sync_in_inference_mode_leaves_state_that_trains() -> None:
    model, other = trained(stack(2)), None
    other = copy.deepcopy(model)
    with torch.inference_mode():
        sync_float8_amax_and_scale_history(model)
    sync_float8_amax_and_scale_history(other)
    for each in (model, other):
        train(each, 5)
    assert not any(buffer.is_inference() for buffer in model.buffers())
    for name, buffer in fp8_state(model).items():
        assert torch.equal(buffer, fp8_state(other)[name]), name
