"""Converting before the weights exist: on the meta device."""

import pytest
import torch
from torch import nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import delayed, tensorwise
from support.devices import on_devices
from support.models import forward_backward, fp8_state, seeded

CONFIGS = pytest.mark.parametrize(
    "config",
    [tensorwise(), delayed(), delayed(enable_amax_init=False)],
    ids=["dynamic", "delayed", "delayed-from-one"],
)


def on_meta(config: Float8LinearConfig) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 17))
    return convert_to_float8_training(model, config=config)


@on_devices
@CONFIGS
@pytest.mark.parametrize("reset", [False, True], ids=["to_empty", "to_empty-and-reset"])
def test_to_empty_gives_valid_state(device: str, config: Float8LinearConfig, reset: bool) -> None:
    model = on_meta(config).to_empty(device=device)
    for layer in model:
        if reset:
            layer.reset_parameters()
        else:
            nn.init.normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    fresh = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 17))
    expected = fp8_state(convert_to_float8_training(fresh, config=config))
    assert fp8_state(model).keys() == expected.keys()
    for name, buffer in fp8_state(model).items():
        assert torch.equal(buffer.cpu(), expected[name]), name
    for _ in range(2):
        results = forward_backward(
            model, seeded(0, 8, 32, device=device), seeded(1, 8, 17, device=device)
        )
        sync_float8_amax_and_scale_history(model)
    assert all(bool(result.isfinite().all()) for result in results.values())


@CONFIGS
def test_a_plain_checkpoint_is_assigned_to_a_meta_model(config: Float8LinearConfig) -> None:
    plain = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 17))
    model = on_meta(config)
    model.load_state_dict(plain.state_dict(), assign=True)
    wanted = convert_to_float8_training(plain, config=config)
    x, g = seeded(0, 8, 32), seeded(1, 8, 17)
    results = forward_backward(model, x, g), forward_backward(wanted, x, g)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[1])


@CONFIGS
@pytest.mark.parametrize("autocast", [False, True])
def test_forward_on_meta_gives_shape_and_dtype(config: Float8LinearConfig, autocast: bool) -> None:
    model = on_meta(config)
    assert all(type(layer) is Float8Linear for layer in model)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(torch.empty(2, 3, 32, device="meta"))
    assert y.shape == (2, 3, 17)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert model[0].weight.grad.shape == (48, 32)


def test_emptied_buffers_of_a_weight_that_came_first_are_as_new() -> None:
    model = on_meta(delayed())
    for layer in model:
        layer.weight, layer.bias = (
            nn.Parameter(torch.randn(p.shape)) for p in (layer.weight, layer.bias)
        )
    new = fp8_state(convert_to_float8_training(nn.Linear(16, 16), config=delayed()))
    for name, x in fp8_state(model.to_empty(device="cpu")).items():
        assert torch.equal(x, new[name.rpartition(".")[2]]), name
