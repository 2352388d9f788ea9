"""Stacks of layers with delayed scaling, and their training steps."""

import torch
from torch import Tensor, nn

import float8
from float8 import all_linears, convert_to_float8_training
from support.configs import delayed
from support.models import forward_backward, seeded

MISSING = "sync_float8_amax_and_scale_history"
"""What the error of a missing sync names."""


def stack(layers: int, device: str = "cpu", **more) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(16, 16, device=device) for _ in range(layers)))
    config = delayed(**more)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def train(model: nn.Module, seed: int = 0) -> None:
    weight = next(model.parameters())
    x = seeded(seed, 4, weight.shape[1], dtype=weight.dtype, device=weight.device)
    model(x).sum().backward()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Sequential, seed: int, *, sync: bool = True) -> dict[str, Tensor]:
    """Forward and backward of 8 rows, from the first layer to the last, and a sync."""
    weight, last = model[0].weight, model[-1].weight
    x = seeded(seed, 8, weight.shape[1], dtype=weight.dtype, device=weight.device)
    g = seeded(seed + 50, 8, last.shape[0], dtype=weight.dtype, device=weight.device)
    results = forward_backward(model, x, g)
    if sync:
        float8.sync_float8_amax_and_scale_history(model)
    return results
