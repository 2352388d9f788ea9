"""A gradient of a gradient is refused: it would silently leave the float8 layers out."""

import pytest
import torch
from torch import nn

from float8 import convert_to_float8_training
from support.configs import delayed, tensorwise
from support.devices import on_devices
from support.models import seeded


@on_devices
@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
def test_differentiating_twice_raises(device: str, config) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 1)).to(device)
    convert_to_float8_training(model, config=config)
    x = seeded(0, 8, 32, device=device).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice"):
        grad.square().sum().backward()
