"""float16 with a GradScaler: overflowing steps are skipped, and scaling goes on after them."""

import pytest
import torch
from torch import nn

from float8 import (
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import delayed
from support.devices import on_devices
from support.models import fp8_state, seeded


@on_devices
@pytest.mark.parametrize("how", ["attached", "by-hand"])
def test_training_goes_on_after_overflowing_steps(device: str, how: str) -> None:
    model = convert_to_float8_training(
        nn.Sequential(nn.Linear(32, 16)).to(device), config=delayed()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "attached":
        attach_to_optimizer(model, optimizer)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**26)
    x, losses, scales = seeded(0, 64, 32, device=device), [], []
    for _ in range(24):
        with torch.autocast(device, torch.float16):
            y = model(x)
        loss = (y.float() - 1).square().mean()
        scaler.scale(loss).backward()
        if how == "by-hand":  # also at the steps that the scaler skips
            sync_float8_amax_and_scale_history(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert scales[0] < 2.0**26  # the first step overflowed
    assert scales[-1] == scales[-2]  # the last did not
    assert losses[-1] < 0.8 * losses[0]
    state = fp8_state(model)
    assert all(bool(buffer.isfinite().all()) for buffer in state.values())
    assert all(bool(state[name] > 0) for name in state if "scale" in name)


@on_devices
def test_a_skipped_step_keeps_the_histories(device: str) -> None:
    """The scaler does not call `optimizer.step`, so the amaxes wait for the next step."""
    model = convert_to_float8_training(
        nn.Sequential(nn.Linear(32, 16)).to(device), config=delayed()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_to_optimizer(model, optimizer)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)

    def step(loss_scale: float) -> None:
        with torch.autocast(device, torch.float16):
            y = model(seeded(0, 64, 32, device=device))
        scaler.scale(y.float().sum() * loss_scale).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(2):
        step(1.0)
    before = {n: b.clone() for n, b in fp8_state(model).items() if b.dim() or "scale" in n}
    step(1e6)  # overflows float16: skipped
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(fp8_state(model)[name], old) for name, old in before.items())
    step(1.0)
    for role in ("input", "weight"):
        assert int((model[0].get_buffer(f"fp8_amax_history_{role}") > 0).sum()) == 3
    for name, old in before.items():
        if "scale_grad_output" in name:  # the overflow spoils it not
            assert torch.equal(fp8_state(model)[name], old)
