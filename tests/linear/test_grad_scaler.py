"""float16 with a GradScaler: overflowing steps are skipped, and scaling goes on after them."""

import torch
from torch import nn

from float8 import attach_to_optimizer, convert_to_float8_training
from support.configs import delayed
from support.devices import on_devices
from support.models import fp8_state, seeded


@on_devices
def test_training_goes_on_after_overflowing_steps(device: str) -> None:
    model = convert_to_float8_training(
        nn.Sequential(nn.Linear(32, 16)).to(device), config=delayed()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_to_optimizer(model, optimizer)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**26)
    x, losses, scales = seeded(0, 64, 32, device=device), [], []
    for _ in range(24):
        with torch.autocast(device, torch.float16):
            y = model(x)
        loss = (y.float() - 1).square().mean()
        scaler.scale(loss).backward()
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
