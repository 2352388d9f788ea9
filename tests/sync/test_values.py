"""The sync of delayed scaling: its values, and what it costs."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from float8 import (
    DelayedScalingConfig,
    Float8Linear,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from sqnr import assert_same_bits
from support.configs import DELAYED, DYNAMIC, delayed, mixed, tensorwise
from support.devices import on_devices
from support.errors import require_errors
from support.models import copied, fp8_state, seeded
from support.simulation import SimulatedHistory
from support.spies import OpCounter
from support.stacks import stack, train

SCALE_FNS = pytest.mark.parametrize("scale_fn_name", ["max", "most_recent"])


@on_devices
@pytest.mark.parametrize("power_of_2", [False, True])
@SCALE_FNS
def test_twenty_training_steps_agree_with_the_simulation(
    device: str, scale_fn_name: str, power_of_2: bool
) -> None:
    config = delayed(
        delayed_scaling_config=DelayedScalingConfig(4, scale_fn_name),
        round_scales_to_power_of_2=power_of_2,
    )
    layer = Float8Linear(16, 32, bias=False, device=device, config=config)
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
            assert scale.item() == (simulated[role].scale or 0), (role, step)
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
    sync_float8_amax_and_scale_history(model)
    train(model)
    amaxes = {name: b.item() for name, b in fp8_state(model).items() if b.dim() == 0}
    sync_float8_amax_and_scale_history(model)
    assert model[0].fp8_amax_history_weight.shape == (2,)
    for index, layer in enumerate(model[:3]):
        scale = amaxes[f"{index}.fp8_amax_input"] / 448
        expected = 2.0 ** math.ceil(math.log2(scale)) if index == 1 else np.float32(scale)
        assert layer.fp8_scale_input.item() == expected


@on_devices
@SCALE_FNS
def test_a_sync_of_nothing_changes_nothing(device: str, scale_fn_name: str) -> None:
    config = DelayedScalingConfig(3, scale_fn_name)
    model = stack(2, device, delayed_scaling_config=config)
    for step in range(2):
        train(model, step)
        sync_float8_amax_and_scale_history(model)
    before = copied(model)
    zeros = torch.zeros(4, 16, device=device)
    for between in ("nothing", "evaluation", "zeros"):
        for _ in range(4):  # more than the history is long
            if between == "evaluation":
                with torch.no_grad():
                    model.eval()(seeded(9, 4, 16, device=device))
            elif between == "zeros":
                with torch.no_grad():
                    torch._foreach_zero_([*model.parameters()])
                model.train()(zeros).backward(zeros)
            sync_float8_amax_and_scale_history(model)
            assert_same_bits(fp8_state(model), before)


def test_arguments_of_a_wrong_type() -> None:
    sync, model = sync_float8_amax_and_scale_history, nn.ReLU()
    require_errors(
        ("TypeError: model: got list, expected an nn.Module", sync, [[]]),
        ("TypeError: got a int of .*, expected a list of Float8L", sync, (model, 3)),
        ("TypeError: got a Float8Linear of .*, expected a", sync, (model, Float8Linear(16, 16))),
        (r"TypeError: got a list of .'Linear'., expected a", sync, (model, [nn.Linear(1, 1)])),
        ("TypeError: got a str of .*, expected a list of", sync, (model, "0")),
    )


@on_devices
@SCALE_FNS
def test_the_number_of_kernels_does_not_grow_with_the_layers(
    device: str, scale_fn_name: str
) -> None:
    dynamic = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=tensorwise())
    config, ops = DelayedScalingConfig(scale_fn_name=scale_fn_name), []
    stacks = (stack(n, device, delayed_scaling_config=config) for n in (2, 20))
    for model in (dynamic, nn.Linear(16, 16), *stacks):
        if fp8_state(model):
            train(model)
        with OpCounter() as counter:
            sync_float8_amax_and_scale_history(model)
        ops.append(counter.ops)
    assert not ops[0]
    assert not ops[1]
    assert ops[2] == ops[3]
    views = sum(ops[2][f"aten.{view}"] for view in ("select", "slice", "unbind", "unsqueeze"))
    assert 0 < ops[2].total() - views < 28  # six of them tell whether amaxes have settled


@pytest.mark.gpu
def test_sync_does_not_wait_for_the_gpu() -> None:
    model = stack(4, "cuda")
    train(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sync_float8_amax_and_scale_history(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
