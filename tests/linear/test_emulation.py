"""`emulate=True`: the same casts, GEMMs in float32 on the dequantised values."""

import pytest
import torch

import tolerances
from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    sync_float8_amax_and_scale_history,
)
from sqnr import same_bits, sqnr
from support.configs import MIXES, mixed, tensorwise
from support.devices import DTYPES, E5M2, on_devices
from support.models import forward_backward, seeded
from support.spies import OpCounter


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
def test_emulation_agrees_with_the_float8_gemms(device: str, mix, dtype: torch.dtype) -> None:
    layer = Float8Linear(72, 40, device=device, dtype=dtype, config=mixed(*mix))
    emulated = Float8Linear.from_float(layer, mixed(*mix, emulate=True))
    x, g = (seeded(i, 24, n, dtype=dtype, device=device) for i, n in ((0, 72), (1, 40)))
    for _ in range(3):
        wanted = forward_backward(emulated, x, g)
        got = forward_backward(layer, x, g)
        for name in wanted:
            assert wanted[name].dtype == got[name].dtype
            assert sqnr(wanted[name], got[name]) > tolerances.GEMM, name
        for each in (layer, emulated):
            sync_float8_amax_and_scale_history(each)


@on_devices
def test_no_float8_gemm_runs(device: str) -> None:
    layer = Float8Linear(32, 16, device=device, config=tensorwise(emulate=True))
    with OpCounter() as counter:
        layer(seeded(0, 4, 32, device=device).requires_grad_()).sum().backward()
    assert counter.gemms == 0
    assert counter.high_precision_gemms == 3


@on_devices
def test_e5m2_times_e5m2_can_be_emulated(device: str) -> None:
    e5m2 = CastConfig(target_dtype=E5M2)
    config = Float8LinearConfig(cast_config_input=e5m2, cast_config_weight=e5m2, emulate=True)
    layer = Float8Linear(64, 32, bias=False, device=device, config=config)
    x, g = seeded(0, 16, 64, device=device), seeded(1, 16, 32, device=device)
    got = forward_backward(layer, x, g)
    assert sqnr(x @ layer.weight.t(), got["output"]) > tolerances.LINEAR_OUTPUT
    assert sqnr(g.t() @ x, got["weight"]) > tolerances.LINEAR_GRAD_WEIGHT


@on_devices
def test_emulation_is_not_rounded_by_autocast(device: str) -> None:
    layer = Float8Linear(32, 16, bias=False, device=device, config=tensorwise(emulate=True))
    x = seeded(0, 4, 32, device=device).bfloat16().float()
    exact = layer(x)
    with torch.autocast(device, torch.bfloat16):
        low = layer(x)
    assert same_bits(low, exact.bfloat16())
