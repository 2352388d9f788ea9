"""The sync of delayed scaling: values, cost, and noticing that one is missing."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from float8 import (
    DelayedScalingConfig,
    Float8Linear,
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import DELAYED, DYNAMIC, delayed, mixed, tensorwise
from support.devices import on_devices
from support.models import FeedForward, fp8_state, seeded
from support.simulation import SimulatedHistory
from support.spies import OpCounter

MISSING = "sync_float8_amax_and_scale_history"


def stack(layers: int, device: str = "cpu", **more) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(16, 16, device=device) for _ in range(layers)))
    return convert_to_float8_training(model, config=delayed(**more))


def train(model: nn.Module, seed: int = 0) -> None:
    weight = next(model.parameters())
    x = seeded(seed, 4, weight.shape[1], dtype=weight.dtype, device=weight.device)
    model(x).sum().backward()


# ---------------------------------------------------------------- values


@on_devices
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("scale_fn_name", ["max", "most_recent"])
def test_twenty_training_steps_agree_with_the_simulation(
    device: str, scale_fn_name: str, power_of_2: bool
) -> None:
    layer = Float8Linear(
        16,
        32,
        bias=False,
        device=device,
        config=delayed(
            delayed_scaling_config=DelayedScalingConfig(4, scale_fn_name),
            round_scales_to_power_of_2=power_of_2,
        ),
    )
    simulated = {
        role: SimulatedHistory(4, scale_fn_name, float8_max, power_of_2)
        for role, float8_max in (("input", 448.0), ("weight", 448.0), ("grad_output", 57344.0))
    }
    rng = np.random.default_rng(5)
    for step in range(20):
        size = {role: float(np.exp(rng.normal())) for role in simulated}
        x = size["input"] * seeded(step, 8, 16, device=device)
        g = size["grad_output"] * seeded(step + 100, 8, 32, device=device)
        with torch.no_grad():
            layer.weight.copy_(size["weight"] * seeded(step + 200, 32, 16, device=device))
        if step in (3, 4, 9):
            x[0, 0] = math.nan if step == 3 else math.inf
        if step in (4, 5, 6, 7, 8):
            g.zero_()  # longer than the history: the scale must stay
        layer(x).backward(g)
        sync_float8_amax_and_scale_history(layer)
        for role, tensor in (("input", x), ("weight", layer.weight), ("grad_output", g)):
            simulated[role].step(tensor.detach().abs().max().item())
            history = layer.get_buffer(f"fp8_amax_history_{role}")
            scale = layer.get_buffer(f"fp8_scale_{role}")
            assert history.tolist() == simulated[role].history, (role, step)
            assert scale.item() == simulated[role].scale, (role, step)
            assert layer.get_buffer(f"fp8_amax_{role}").item() == 0


def test_layers_of_different_settings_are_synced_each_by_its_own() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    configs = [
        delayed(delayed_scaling_config=DelayedScalingConfig(2, "most_recent")),
        delayed(round_scales_to_power_of_2=True),
        mixed(DELAYED, DYNAMIC, DYNAMIC),
        tensorwise(),
    ]
    for index, config in enumerate(configs):
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda mod, fqn, i=index: fqn == str(i)
        )
    train(model)
    amaxes = {name: b.item() for name, b in fp8_state(model).items() if b.dim() == 0}
    sync_float8_amax_and_scale_history(model)
    assert model[0].fp8_amax_history_weight.shape == (2,)
    for index, layer in enumerate(model[:3]):
        scale = amaxes[f"{index}.fp8_amax_input"] / 448
        expected = 2.0 ** math.ceil(math.log2(scale)) if index == 1 else np.float32(scale)
        assert layer.fp8_scale_input.item() == expected


def test_layers_can_be_named() -> None:
    model = stack(3)
    train(model)
    sync_float8_amax_and_scale_history(model, fp8_layers=[model[0], model[2]])
    assert [layer.fp8_scale_input.item() > 0 for layer in model] == [True, False, True]


@pytest.mark.parametrize("config", [tensorwise(), None], ids=["dynamic", "unconverted"])
def test_nothing_to_do_is_fine(config) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    if config is not None:
        convert_to_float8_training(model, config=config)
    with OpCounter() as counter:
        sync_float8_amax_and_scale_history(model)
    assert not counter.ops


# ---------------------------------------------------------------- cost


@on_devices
@pytest.mark.parametrize("scale_fn_name", ["max", "most_recent"])
def test_the_number_of_kernels_does_not_grow_with_the_layers(
    device: str, scale_fn_name: str
) -> None:
    ops = []
    for layers in (2, 20):
        config = DelayedScalingConfig(scale_fn_name=scale_fn_name)
        model = stack(layers, device, delayed_scaling_config=config)
        train(model)
        sync_float8_amax_and_scale_history(model)  # stacks the state, once
        train(model)
        with OpCounter() as counter:
            sync_float8_amax_and_scale_history(model)
        ops.append(counter.ops)
    assert ops[0] == ops[1]
    assert 0 < ops[0].total() < 25


@pytest.mark.gpu
def test_sync_does_not_wait_for_the_gpu() -> None:
    model = stack(4, "cuda")
    train(model)
    sync_float8_amax_and_scale_history(model)
    train(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sync_float8_amax_and_scale_history(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------- the right buffers


def synced_right(model: nn.Module, layers: list[Float8Linear]) -> None:
    """Train and sync; every layer's own buffers must have taken the step's amaxes."""
    train(model)
    amaxes = [layer.fp8_amax_input.item() for layer in layers]
    assert all(amax > 0 for amax in amaxes)
    sync_float8_amax_and_scale_history(model)
    assert [layer.fp8_amax_history_input[0].item() for layer in layers] == amaxes
    assert [layer.fp8_amax_input.item() for layer in layers] == [0.0] * len(layers)


@on_devices
@pytest.mark.parametrize(
    "change",
    ["to-dtype", "deepcopy", "load", "load-assign", "reset", "new-layer", "to_empty"],
)
def test_sync_updates_the_layers_own_buffers_after(device: str, change: str) -> None:
    model = stack(3, device)
    synced_right(model, list(model))
    if change == "to-dtype":
        model.to(torch.bfloat16)
    elif change == "deepcopy":
        model = copy.deepcopy(model)
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
    synced_right(model, list(model))


@pytest.mark.gpu
def test_sync_updates_the_layers_own_buffers_after_moving() -> None:
    model = stack(3, "cpu")
    synced_right(model, list(model))
    for device in ("cuda", "cpu", "cuda"):
        synced_right(model.to(device), list(model))


def test_syncing_a_part_between_syncs_of_the_whole() -> None:
    model = stack(3)
    synced_right(model, list(model))
    synced_right(model[:2], list(model[:2]))
    synced_right(model, list(model))


def test_a_copy_and_its_original_are_synced_apart() -> None:
    model = stack(2)
    synced_right(model, list(model))
    clone = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in fp8_state(clone).items()}
    synced_right(model, list(model))
    assert all(torch.equal(buffer, before[name]) for name, buffer in fp8_state(clone).items())


@on_devices
def test_sync_takes_a_compiled_model(device: str) -> None:
    model = stack(2, device)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        synced_right(compiled, list(model))


def test_shared_layers_are_synced_once() -> None:
    linear = nn.Linear(16, 16)
    model = convert_to_float8_training(nn.Sequential(linear, nn.ReLU(), linear), config=delayed())
    train(model)
    peak = model[0].fp8_amax_input.item()
    sync_float8_amax_and_scale_history(model)
    assert model[0].fp8_amax_history_input.tolist() == [peak] + [0.0] * 15


# ---------------------------------------------------------------- a missing sync


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


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


def test_eval_mode_does_not_raise() -> None:
    model = stack(2)
    train(model)
    optimizer_of(model).step()
    model.eval()
    model(seeded(0, 4, 16))
    model.train()
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


# ---------------------------------------------------------------- attach_to_optimizer


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
