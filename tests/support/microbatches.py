"""Training with gradient accumulation, with weights held in float8 and without."""

import copy
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    Float8Weights,
    all_linears,
    attach_to_optimizer,
    convert_to_float8_training,
)
from sqnr import assert_same_bits
from support.models import FeedForward, copied, fp8_state, seeded

MICROBATCHES = 3
SHAPE = (8, 32)
ON_THE_FLY, HELD = Float8Weights.ON_THE_FLY, Float8Weights.HELD


def with_weights(
    config: Float8LinearConfig | None, weights: Float8Weights = HELD
) -> Float8LinearConfig:
    return dataclasses.replace(config or Float8LinearConfig(), float8_weights=weights)


def model_of(config: Float8LinearConfig | None = None, device: str = "cpu") -> nn.Module:
    """Three float8 layers, the same at every call; takes inputs of `SHAPE`."""
    torch.manual_seed(0)
    model = FeedForward(32, 48).to(device)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def layers_of(model: nn.Module) -> list[Float8Linear]:
    return [layer for layer in model.modules() if isinstance(layer, Float8Linear)]


@torch.no_grad()
def by_hand(model: nn.Module) -> None:
    """Write the weights of all float8 layers in place."""
    for layer in layers_of(model):
        layer.weight.mul_(3)


def weight_casts(model: nn.Module, run: Callable[[], object]) -> int:
    """How many weights of float8 layers are cast while `run()` runs, compiled or not."""
    shapes = [list(layer.weight.shape) for layer in layers_of(model)]
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True) as profile:
        run()
    casts = [each for each in profile.events() if each.name.startswith("float8::cast")]
    return sum(each.input_shapes[0] in shapes for each in casts)


def training_forward_casts(model: nn.Module) -> int:
    """How many weights a forward of training casts: none that is held."""
    return weight_casts(model, lambda: model(seeded(0, *SHAPE).requires_grad_()))


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


def assert_held_equals_on_the_fly(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    compile: Callable[[nn.Module], nn.Module] = lambda model: model,
    autocast: torch.dtype | None = None,
    steps: int = 3,
) -> None:
    """Train two copies of `model` with AdamW: equal in all results and all state of each step."""
    everything = []
    for weights in (ON_THE_FLY, HELD):
        module = copy.deepcopy(model)
        config = with_weights(layers_of(module)[0].config, weights)
        convert_to_float8_training(module, config=config)
        call = compile(module) if weights is HELD else module
        found: dict[str, Tensor] = {}
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        attach_to_optimizer(module, optimizer)
        for step in range(steps):
            results = accumulate(module, call, step, shape, autocast=autocast)
            results |= copied(module)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            results |= {f"{name}, synced": b.clone() for name, b in fp8_state(module).items()}
            results |= {name: p.detach().clone() for name, p in module.named_parameters()}
            found |= {f"step {step}: {name}": value for name, value in results.items()}
        everything.append(found)
    assert_same_bits(*everything)
