"""float16 with a GradScaler: overflowing steps are skipped, and scaling goes on after them."""

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    attach_to_optimizer,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.configs import delayed
from support.devices import on_devices
from support.models import fp8_state, seeded


class Run:
    """A layer, its optimizer and a scaler."""

    def __init__(self, device: str, init_scale: float, attach: bool) -> None:
        self.x = seeded(0, 64, 32, device=device)
        layer = nn.Linear(32, 16).to(device)
        self.layer = convert_to_float8_training(layer, config=delayed())
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.attached = attach
        if attach:
            attach_to_optimizer(self.layer, self.optimizer)
        self.scaler = torch.amp.GradScaler(device, init_scale=init_scale)

    def output(self) -> Tensor:
        with torch.autocast(self.x.device.type, torch.float16):
            return self.layer(self.x)

    def step(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        if not self.attached:  # also at the steps that the scaler skips
            sync_float8_amax_and_scale_history(self.layer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


@on_devices
@pytest.mark.parametrize("attach", [True, False], ids=["attached", "by-hand"])
def test_training_goes_on_after_overflowing_steps(device: str, attach: bool) -> None:
    run, losses, scales = Run(device, 2.0**26, attach), [], []
    for _ in range(24):
        loss = (run.output().float() - 1).square().mean()
        run.step(loss)
        losses.append(loss.item())
        scales.append(run.scaler.get_scale())
    assert scales[0] < 2.0**26  # the first step overflowed
    assert scales[-1] == scales[-2]  # the last did not
    assert losses[-1] < 0.8 * losses[0]
    state = fp8_state(run.layer)
    assert all(bool(buffer.isfinite().all()) for buffer in state.values())
    assert all(bool(state[name] > 0) for name in state if "scale" in name)


@on_devices
def test_a_skipped_step_keeps_the_histories(device: str) -> None:
    """The scaler does not call `optimizer.step`, so the amaxes wait for the next step."""
    run = Run(device, 4.0, attach=True)
    for _ in range(2):
        run.step(run.output().float().sum())
    state = fp8_state(run.layer)
    before = {n: b.clone() for n, b in state.items() if b.dim() or "scale" in n}
    run.step(run.output().float().sum() * 1e6)  # overflows float16: skipped
    assert run.scaler.get_scale() == 2.0
    assert all(torch.equal(state[name], old) for name, old in before.items())
    run.step(run.output().float().sum())
    for role in ("input", "weight"):
        assert int((state[f"fp8_amax_history_{role}"] > 0).sum()) == 3
    # The overflow spoils it not.
    name = "fp8_scale_grad_output"
    assert torch.equal(state[name], before[name])
