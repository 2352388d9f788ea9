"""Which GEMMs run: only those whose result somebody needs, and only in float8."""

import pytest
import torch

from float8 import Float8Linear, Float8LinearConfig
from support.configs import DISABLED, DYNAMIC, delayed, tensorwise
from support.devices import on_devices
from support.models import forward_backward, seeded
from support.spies import OpCounter

X = (16, 32)
SECOND_USES = "input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight"
CONFIGS = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])


@on_devices
@CONFIGS
@pytest.mark.parametrize(
    ("trained", "gemms"),
    [
        ({"weight", "bias", "input"}, 3),
        ({"bias", "input"}, 2),
        ({"weight"}, 2),
        ({"bias"}, 1),
    ],
    ids=["all", "frozen-weight", "input-without-grad", "bias-alone"],
)
def test_only_needed_gemms_run(device: str, config, trained: set[str], gemms: int) -> None:
    layer = Float8Linear(32, 48, device=device, config=config)
    x = seeded(0, *X, device=device)
    tensors = {"weight": layer.weight, "bias": layer.bias, "input": x}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in trained)
    with OpCounter() as counter:
        layer(x).sum().backward()
    assert counter.gemms == gemms
    assert counter.high_precision_gemms == 0
    assert {name for name, tensor in tensors.items() if tensor.grad is not None} == trained


@on_devices
@CONFIGS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_gemm_runs_where_nothing_is_differentiated(
    device: str, config: Float8LinearConfig, mode
) -> None:
    layer = Float8Linear(32, 48, device=device, config=config)
    x = seeded(0, *X, device=device).requires_grad_()
    with OpCounter() as counter, mode():
        y = layer(x)
    assert counter.gemms == 1
    assert not y.requires_grad
    assert torch.equal(y, layer(x))


@on_devices
@pytest.mark.parametrize(
    ("off", "float8_gemms"),
    [
        (("input", "weight"), 2),
        (("grad_output", "weight_for_grad_input"), 2),
        (("grad_output_for_grad_weight", "input_for_grad_weight"), 2),
        (("input", "weight", "grad_output", "weight_for_grad_input"), 1),
        (("input", "weight", "grad_output", *SECOND_USES), 0),
    ],
)
def test_disabled_gemms_run_in_high_precision(
    device: str, off: tuple[str, ...], float8_gemms: int
) -> None:
    casts = {f"cast_config_{site}": DYNAMIC for site in SECOND_USES}
    config = Float8LinearConfig(**casts | {f"cast_config_{site}": DISABLED for site in off})
    layer = Float8Linear(32, 48, bias=False, device=device, config=config)
    x, g = seeded(0, *X, device=device), seeded(1, 16, 48, device=device)
    with OpCounter() as counter:
        got = forward_backward(layer, x, g)
    assert counter.gemms == float8_gemms
    assert counter.high_precision_gemms == 3 - float8_gemms
    w = layer.weight.detach()
    exact = {
        "input": torch.equal(got["output"], x @ w.t()),
        "weight_for_grad_input": torch.equal(got["input"], g @ w),
        "input_for_grad_weight": torch.equal(got["weight"], g.t() @ x),
    }
    assert exact == {site: site in off for site in exact}
