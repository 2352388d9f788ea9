"""`float8.linear`: what a `Float8Linear` computes, without a module."""

import pytest
import torch
from torch import Tensor

from float8 import Float8Linear, Float8LinearConfig, Float8Tensor, linear
from sqnr import same_bits
from support.configs import DELAYED, DISABLED, DYNAMIC, delayed, mixed, tensorwise
from support.devices import on_devices
from support.models import seeded

K, N = 33, 40
HIGH_PRECISION_GRAD_WEIGHT = tensorwise(
    cast_config_input_for_grad_weight=DISABLED, cast_config_grad_output_for_grad_weight=DISABLED
)
CONFIGS = {
    "default": None,
    "powers of two": tensorwise(round_scales_to_power_of_2=True),
    "emulated": tensorwise(emulate=True),
    "grad_weight in high precision": HIGH_PRECISION_GRAD_WEIGHT,
}


def assert_same(layer: Float8Linear, x: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
    """Output and gradients of the layer and of the function, which may take another `weight`."""
    weight = layer.weight if weight is None else weight
    results = []
    for run in (layer, lambda x: linear(x, weight, layer.bias, config=layer.config)):
        layer.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        y = run(leaf)
        with torch.autocast(x.device.type, enabled=False):
            y.backward(seeded(1, *y.shape, device=x.device, dtype=y.dtype))
        gradients = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
        results.append({"output": y.detach(), "input": leaf.grad, **gradients})
    mine, theirs = results
    for name in mine:
        assert mine[name].stride() == theirs[name].stride(), name
        assert same_bits(mine[name], theirs[name]), name
    return theirs


@on_devices
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_layer(device: str, bias: bool, config: Float8LinearConfig | None) -> None:
    layer = Float8Linear(K, N, bias, device=device, config=config)
    for leading in ((24,), (), (2, 3), (2, 0)):
        got = assert_same(layer, seeded(0, *leading, K, device=device))
        assert got["output"].shape == (*leading, N)
    with torch.autocast(device, torch.bfloat16):
        got = assert_same(layer, seeded(0, 24, K, device=device))
    assert got["output"].dtype == torch.bfloat16
    assert got["weight"].dtype == torch.float32
    assert_same(layer.half(), seeded(0, 24, K, device=device, dtype=torch.float16))
    no_features = linear(seeded(0, 2, 3, 0, device=device), seeded(0, N, 0, device=device))
    assert same_bits(no_features, torch.zeros(2, 3, N, device=device))


@on_devices
@pytest.mark.parametrize("power_of_2", [False, True])
def test_a_float8_weight_gives_what_the_layer_that_casts_it_gives(
    device: str, power_of_2: bool
) -> None:
    layer = Float8Linear(K, N, config=tensorwise(round_scales_to_power_of_2=power_of_2))
    layer.to(device).weight.requires_grad_(False)
    cast = Float8Tensor.from_high_precision(layer.weight, round_scales_to_power_of_2=power_of_2)
    assert_same(layer, seeded(0, 3, 8, K, device=device), cast)


@pytest.mark.parametrize(
    "config", [delayed(), mixed(DYNAMIC, DYNAMIC, DELAYED)], ids=["all", "grad_output"]
)
def test_delayed_scaling_needs_a_layer(config: Float8LinearConfig) -> None:
    with pytest.raises(ValueError, match=r"delayed scaling.*use Float8Linear"):
        linear(seeded(0, 16, K), seeded(1, N, K), config=config)
