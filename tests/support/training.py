"""Training an eager and a compiled copy of one model side by side."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import float8
from float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    save_gemm_outputs,
)
from sqnr import assert_close
from support.models import seeded

WRAPPINGS: dict[str, Callable] = {
    "plain": lambda inner, x: inner(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "selective-checkpoint": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_gemm_outputs),
    ),
}


class Wrapped(nn.Module):
    """A module run as it is, or under activation checkpointing."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Tensor:
        return WRAPPINGS[self.how](self.inner, x)


def one_layer(config: Float8LinearConfig, device: str = "cpu", how: str = "plain") -> Wrapped:
    """SiLU, Linear: 32 -> 64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.SiLU(), nn.Linear(32, 64)).to(device)
    return Wrapped(convert_to_float8_training(model, config=config), how)


def two_layers(config: Float8LinearConfig, device: str = "cpu", how: str = "plain") -> Wrapped:
    """Linear, SiLU, Linear: 32 -> 64 -> 32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)).to(device)
    return Wrapped(convert_to_float8_training(model, config=config), how)


class SideBySide:
    """One model, and a copy of it that is compiled whole, trained on the same data."""

    def __init__(self, model: nn.Module, backend: str = "aot_eager", **how: Any) -> None:
        self.model, self.copy = model, copy.deepcopy(model)
        self.counter = CompileCounterWithBackend(backend)
        how = how or {"backend": self.counter}
        self.compiled = torch.compile(self.copy, fullgraph=True, **how)

    def step(
        self,
        seed: int,
        bound: float = math.inf,
        *,
        autocast: torch.dtype | None = None,
        tokens: int = 16,
    ) -> None:
        """Take a training step in both, and compare all results and state."""
        pairs = (self.model, self.model), (self.copy, self.compiled)
        eager, compiled = (self._step(*pair, seed, autocast, tokens) for pair in pairs)
        assert_close(eager, compiled, bound, seed)

    def _step(self, module, call, seed, autocast, tokens) -> dict[str, Tensor]:
        weight = next(module.parameters())
        device = weight.device.type
        module.zero_grad(set_to_none=True)
        x = seeded(seed, tokens, 32, dtype=weight.dtype, device=device).requires_grad_()
        with nullcontext() if autocast is None else torch.autocast(device, autocast):
            y = call(x)
        y.backward(seeded(seed + 100, *y.shape, dtype=y.dtype, device=device))
        float8.sync_float8_amax_and_scale_history(call)
        results = {"output": y.detach().clone(), "input": x.grad}
        results |= {name: p.grad for name, p in module.named_parameters()}
        return results | {name: buffer.clone() for name, buffer in module.named_buffers()}
