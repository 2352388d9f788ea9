"""float32 parameters under autocast, and float16 with a GradScaler."""

import pytest
import torch
from torch import nn

import tolerances
from float8 import (
    Float8Linear,
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from sqnr import same_bits, sqnr
from support.configs import FINER, RECIPES, delayed, of_recipe, tensorwise
from support.devices import on_devices
from support.models import FeedForward, copied, forward_backward, fp8_state, seeded

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@on_devices
@LOW
@pytest.mark.parametrize("recipe", [*RECIPES, *FINER])
def test_dtypes_and_values(device: str, recipe: str, dtype: torch.dtype) -> None:
    model = FeedForward(64, 128, bias=True).to(device)
    x, g = seeded(0, 32, 64, device=device), seeded(1, 32, 64, device=device)
    wanted = forward_backward(model, x, g, dtype)
    convert_to_float8_training(model, config=of_recipe(recipe))
    for _ in range(3):
        got = forward_backward(model, x, g, dtype)
        sync_float8_amax_and_scale_history(model)
    assert got["output"].dtype == dtype
    for name in wanted:
        assert got[name].dtype == wanted[name].dtype, name
        assert sqnr(wanted[name], got[name]) > tolerances.FFN, name


@on_devices
@LOW
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_input_dtype_is_cast_to_that_of_autocast(
    device: str, dtype: torch.dtype, input_dtype: torch.dtype
) -> None:
    layer = Float8Linear(32, 16, device=device)
    x = seeded(0, 4, 32, device=device, dtype=input_dtype)
    with torch.autocast(device, dtype):
        y = layer(x)
        assert same_bits(y, layer(x.to(dtype)))
        if input_dtype == torch.float32:
            with torch.autocast(device, enabled=False):
                assert layer(x).dtype == torch.float32
    assert y.dtype == dtype


@on_devices
def test_autocast_does_not_change_the_gemm_of_float8_data(device: str) -> None:
    layer = Float8Linear(32, 16, bias=False, device=device)
    gradients = []
    for inside in (False, True):
        layer.weight.grad = None
        with torch.autocast(device, torch.bfloat16):
            y = layer(seeded(0, 4, 32, device=device))
        with torch.autocast(device, torch.bfloat16, enabled=inside):
            y.sum().backward()
        gradients.append(layer.weight.grad)
    assert same_bits(*gradients)
    assert gradients[0].dtype == torch.float32


@on_devices
def test_autocast_rounds_neither_the_weight_nor_emulated_products(device: str) -> None:
    layer = Float8Linear(32, 16, bias=False, device=device, config=tensorwise(emulate=True))
    x = seeded(0, 4, 32, device=device).bfloat16().float()
    exact = layer(x)
    with torch.autocast(device, torch.bfloat16):
        low = layer(x)
    assert same_bits(low, exact.bfloat16())


@pytest.mark.gpu
def test_autocast_of_another_device_does_not_count() -> None:
    layer = Float8Linear(32, 16, device="cuda")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(seeded(0, 4, 32, device="cuda")).dtype == torch.float32


class Run:
    """A layer, its optimizer and a scaler."""

    def __init__(self, device: str) -> None:
        self.x = seeded(0, 64, 32, device=device)
        layer = nn.Linear(32, 16).to(device)
        self.layer = convert_to_float8_training(layer, config=delayed())
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        attach_to_optimizer(self.layer, self.optimizer)
        self.scaler = torch.amp.GradScaler(device, init_scale=4.0)

    def step(self, factor: float = 1) -> None:
        with torch.autocast(self.x.device.type, torch.float16):
            y = self.layer(self.x)
        self.scaler.scale(y.float().sum() * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


@on_devices
def test_a_skipped_step_keeps_the_histories(device: str) -> None:
    """The scaler does not call `optimizer.step`, so the amaxes wait for the next step."""
    run = Run(device)
    for _ in range(2):
        run.step()
    state = fp8_state(run.layer)
    before = {n: b for n, b in copied(run.layer).items() if b.dim() or "scale" in n}
    run.step(1e6)  # overflows float16: skipped
    assert run.scaler.get_scale() == 2.0
    assert all(torch.equal(state[name], old) for name, old in before.items())
    run.step()
    for role in ("input", "weight"):
        assert int((state[f"fp8_amax_history_{role}"] > 0).sum()) == 3
    # The overflow spoils it not.
    name = "fp8_scale_grad_output"
    assert torch.equal(state[name], before[name])
