"""Training with gradient accumulation, with and without cached weights."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    all_linears,
    cached_weights,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from support.models import FeedForward, fp8_state, seeded

MICROBATCHES = 3
SHAPE = (8, 32)


def model_of(config: Float8LinearConfig | None = None, device: str = "cpu") -> nn.Module:
    """Three float8 layers, the same at every call; takes inputs of `SHAPE`."""
    torch.manual_seed(0)
    model = FeedForward(32, 48).to(device)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def layers_of(model: nn.Module) -> list[Float8Linear]:
    return [layer for layer in model.modules() if isinstance(layer, Float8Linear)]


def assert_closed(model: nn.Module) -> None:
    """Nothing is cached."""
    for layer in layers_of(model):
        assert layer.cached_weight is None
        assert layer.weight_cache is None


@torch.no_grad()
def by_hand(model: nn.Module) -> None:
    """Write the weights of all float8 layers in place."""
    for layer in layers_of(model):
        layer.weight.mul_(3)


def accumulate(
    model: nn.Module,
    call: nn.Module,
    step: int,
    shape: tuple[int, ...],
    *,
    autocast: torch.dtype | None = None,
    between: Callable[[int], None] = lambda microbatch: None,
) -> dict[str, Tensor]:
    """Forward and backward of the microbatches of one step: every output and gradient.

    Each microbatch is larger than the one before, so that amaxes grow.
    """
    weight = next(model.parameters())
    device, results = weight.device.type, {}
    for microbatch in range(MICROBATCHES):
        between(microbatch)
        x = seeded(10 * step + microbatch, *shape, dtype=weight.dtype, device=device)
        x = ((1 + microbatch) * x).requires_grad_()
        with nullcontext() if autocast is None else torch.autocast(device, autocast):
            y = call(x)
        y.backward(seeded(step + 100, *y.shape, dtype=y.dtype, device=device))
        results[f"output {microbatch}"] = y.detach().clone()
        if x.grad is not None:
            results[f"input {microbatch}"] = x.grad.clone()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad.clone()
    return results


def steps_with_and_without(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    compile: Callable[[nn.Module], nn.Module] = lambda model: model,
    autocast: torch.dtype | None = None,
    steps: int = 3,
) -> list[tuple[str, Tensor, Tensor]]:
    """Train two copies of `model`: `(name, without, with)` of all results and all state.

    The cached weights are closed before the optimizer steps.
    """
    plain, cached = copy.deepcopy(model), copy.deepcopy(model)
    everything = []
    for module, around in ((plain, lambda module: nullcontext()), (cached, cached_weights)):
        call, found = compile(module), {}
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        for step in range(steps):
            with around(module):
                results = accumulate(module, call, step, shape, autocast=autocast)
            results |= {name: b.clone() for name, b in fp8_state(module).items()}
            sync_float8_amax_and_scale_history(module)
            results |= {f"{name}, synced": b.clone() for name, b in fp8_state(module).items()}
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            results |= {name: p.detach().clone() for name, p in module.named_parameters()}
            found |= {f"step {step}: {name}": value for name, value in results.items()}
        everything.append(found)
    without, with_cache = everything
    assert without.keys() == with_cache.keys()
    return [(name, without[name], with_cache[name]) for name in without]
