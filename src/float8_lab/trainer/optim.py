"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from float8_lab.trainer.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, one fused kernel per group."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True
    )


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale all gradients down to a global norm of `limit`, 0 for no limit; collective if sharded.

    Returns:
        The norm before, 0-dim float32, of the whole model on each rank. Nothing waits for it.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit or float("inf"), norm)
    return norm


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

    Rises linearly to `learning_rate` at step `warmup_steps`, then falls along half a cosine to
    `learning_rate * min_lr_ratio` at the last step.
    """
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_ratio
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    decay_steps = config.steps - config.warmup_steps
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every parameter group the learning rate `value`."""
    for group in optimizer.param_groups:
        group["lr"] = value
