"""Outputs and gradients are no views and lie in memory of their own size: writes in place work."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    Float8Weights,
    all_linears,
    convert_to_float8_training,
    grouped_linear,
    update_float8_weights,
)
from sqnr import same_bits
from support.configs import FINER, RECIPES, of_recipe
from support.devices import on_devices
from support.models import seeded
from support.modes import running

EVERY = pytest.mark.parametrize("recipe", [*RECIPES, *FINER, "mxfp8"])


def emulated(recipe: str) -> bool:
    return recipe == "mxfp8"  # which GPUs before Blackwell do not multiply


def assert_own(*tensors: Tensor | None) -> None:
    for x in tensors:
        assert x is not None
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def rectified(run: nn.Module, x: Tensor, grad: Tensor, *, in_place: bool) -> list[Tensor]:
    """What a layer and ReLU make of `x`, and all gradients."""
    x = x.detach().requires_grad_()
    run.zero_grad()
    y = run(x)
    assert_own(y)
    assert not y._is_view()
    y = y.relu_() if in_place else y.relu()
    y.backward(grad)
    return [y.detach(), *(each.grad for each in (x, *run.parameters()) if each.requires_grad)]


@EVERY
@on_devices
def test_writes_in_place_work_for_any_number_of_tokens(device: str, recipe: str) -> None:
    """Padding is left out, and its memory freed: one row, too, which is contiguous in any case."""
    for shape, features, weights, bias in (
        ((20, 64), 48, Float8Weights.ON_THE_FLY, False),
        ((3, 7, 50), 33, Float8Weights.ON_THE_FLY, False),
        ((1, 64), 33, Float8Weights.HELD, True),
        ((17, 64), 48, Float8Weights.ONLY, False),
    ):
        try:
            config = of_recipe(recipe, float8_weights=weights, emulate=emulated(recipe))
        except ValueError:  # not all keep weights in float8
            continue
        run = nn.Sequential(nn.Linear(shape[-1], features, bias, device=device))
        run.requires_grad_(weights is not Float8Weights.ONLY)
        convert_to_float8_training(run.eval(), config=config, module_filter_fn=all_linears)
        if weights is Float8Weights.HELD:
            update_float8_weights(run.train())
        x = seeded(0, *shape, device=device)
        grad = seeded(1, *shape[:-1], features, device=device)
        wanted, got = (rectified(run, x, grad, in_place=each) for each in (False, True))
        assert all(map(same_bits, got, wanted))
        assert_own(*got)


@pytest.mark.parametrize("mode", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "recipe", ["tensorwise", pytest.param("blockwise", marks=pytest.mark.exhaustive)]
)
def test_compiled_code_returns_no_padding_either(recipe: str, mode: str) -> None:
    device = "cuda" if mode == "inductor" else "cpu"
    layer = nn.Sequential(nn.Linear(64, 33, bias=False, device=device))  # Inductor sums its own way
    convert_to_float8_training(layer, config=recipe, module_filter_fn=all_linears)
    x, grad = seeded(0, 20, 64, device=device), seeded(1, 20, 33, device=device)
    got, wanted = (rectified(run, x, grad, in_place=True) for run in (running(layer, mode), layer))
    assert all(map(same_bits, got, wanted))
    assert_own(*got)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
@on_devices
def test_experts_of_any_size(device: str, recipe: str) -> None:
    config = of_recipe(recipe, emulate=True)
    offs = torch.tensor([5, 5, 21], dtype=torch.int32, device=device)
    for experts, (N, K) in itertools.product((1, 3), ((64, 32), (50, 32), (33, 17))):
        x = seeded(0, 23, K, device=device).requires_grad_()
        w = seeded(1, experts, N, K, device=device).requires_grad_()
        grads = []
        for relu in (torch.relu, torch.relu_):
            y = grouped_linear(x, w, offs[:experts], config=config)
            assert_own(y)
            grads.append(torch.autograd.grad(relu(y).sum(), (x, w)))
        assert all(map(same_bits, *grads))
        assert_own(*grads[1])
