"""Which GEMMs run: only those whose result somebody needs, and only in float8."""

import pytest
import torch

import tolerances
from float8 import Float8Linear, Float8LinearConfig
from sqnr import sqnr
from support.configs import DISABLED, DYNAMIC, MIXES, delayed, mixed, tensorwise
from support.devices import on_devices
from support.models import seeded
from support.spies import OpCounter

X = (16, 32)
CONFIGS = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])


@on_devices
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("weight_grad", "input_grad", "gemms"),
    [(True, True, 3), (False, True, 2), (True, False, 2)],
    ids=["all", "frozen-weight", "input-without-grad"],
)
def test_only_needed_gemms_run(
    device: str, mix, weight_grad: bool, input_grad: bool, gemms: int
) -> None:
    layer = Float8Linear(32, 48, bias=False, device=device, config=mixed(*mix))
    layer.weight.requires_grad_(weight_grad)
    x = seeded(0, *X, device=device).requires_grad_(input_grad)
    with OpCounter() as counter:
        layer(x).sum().backward()
    assert counter.gemms == gemms
    assert counter.high_precision_gemms == 0
    assert (layer.weight.grad is not None) == weight_grad
    assert (x.grad is not None) == input_grad


@on_devices
@CONFIGS
def test_bias_alone_trains_without_backward_gemms(device: str, config: Float8LinearConfig) -> None:
    layer = Float8Linear(32, 48, device=device, config=config)
    layer.weight.requires_grad_(False)
    with OpCounter() as counter:
        layer(seeded(0, *X, device=device)).sum().backward()
    assert counter.gemms == 1
    assert layer.bias.grad is not None


@on_devices
@CONFIGS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_gemm_runs_where_nothing_is_differentiated(
    device: str, config: Float8LinearConfig, mode
) -> None:
    layer = Float8Linear(32, 48, device=device, config=config)
    with OpCounter() as counter, mode():
        y = layer(seeded(0, *X, device=device).requires_grad_())
    assert counter.gemms == 1
    assert not y.requires_grad


@on_devices
@CONFIGS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_output_does_not_depend_on_the_grad_mode(
    device: str, config: Float8LinearConfig, mode
) -> None:
    layer = Float8Linear(32, 48, device=device, config=config)
    x = seeded(0, *X, device=device)
    with mode():
        y = layer(x)
    assert torch.equal(y, layer(x))


@on_devices
@pytest.mark.parametrize(
    ("off", "float8_gemms"),
    [
        (("input", "weight"), 2),
        (("grad_output", "weight_for_grad_input"), 2),
        (("grad_output_for_grad_weight", "input_for_grad_weight"), 2),
        (("input", "weight", "grad_output", "weight_for_grad_input"), 1),
    ],
)
def test_disabled_gemms_run_in_high_precision(
    device: str, off: tuple[str, ...], float8_gemms: int
) -> None:
    sites = ("input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight")
    casts = {f"cast_config_{site}": DYNAMIC for site in sites}
    config = Float8LinearConfig(**casts | {f"cast_config_{site}": DISABLED for site in off})
    layer = Float8Linear(32, 48, bias=False, device=device, config=config)
    x, g = seeded(0, *X, device=device).requires_grad_(), seeded(1, 16, 48, device=device)
    with OpCounter() as counter:
        y = layer(x)
        y.backward(g)
    assert counter.gemms == float8_gemms
    assert counter.high_precision_gemms == 3 - float8_gemms
    exact = {
        "input": torch.equal(y, x.detach() @ layer.weight.detach().t()),
        "weight_for_grad_input": torch.equal(x.grad, g @ layer.weight.detach()),
        "input_for_grad_weight": torch.equal(layer.weight.grad, g.t() @ x.detach()),
    }
    assert exact == {site: site in off for site in exact}


@on_devices
def test_all_disabled_equals_nn_linear(device: str) -> None:
    config = mixed(DISABLED, DISABLED, DISABLED)
    layer = Float8Linear(30, 17, bias=False, device=device, config=config)
    plain = torch.nn.Linear(30, 17, bias=False, device=device)
    plain.weight = layer.weight
    results = []
    for module in (layer, plain):
        x = seeded(0, 5, 30, device=device).requires_grad_()
        layer.weight.grad = None
        y = module(x)
        y.backward(seeded(1, 5, 17, device=device))
        results.append((y, x.grad, layer.weight.grad))
    for a, b in zip(*results, strict=True):
        assert sqnr(a, b) > tolerances.HIGH_PRECISION
