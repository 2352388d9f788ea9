"""The residual connection around fused functions, and inputs that somebody keeps anyway."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import (
    Float8LinearConfig,
    all_linears,
    convert_to_float8_training,
    linear_keeping_input,
    rms_norm_linear,
    swiglu_feed_forward,
    sync_float8_amax_and_scale_history,
)
from sqnr import sqnr
from support.configs import RECIPES
from support.devices import E4M3, E5M2, on_devices
from support.models import forward_backward, seeded, three_ways
from support.spies import OpCounter, saved_tensors

DIM, HIDDEN = 48, 80


class Block(nn.Module):
    """Two layers of a norm and a SwiGLU, each added to what came in."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM, eps=1e-5) for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            a, b, x = rms_norm_linear(x, self.norms[0], tuple(self.mix), residual=True)
            x = x + linear_keeping_input(torch.tanh(a * b), self.out)
            layers = (self.gate, self.up, self.down)
            return swiglu_feed_forward(x, *layers, norm=self.norms[1], residual=True)
        normed = self.norms[0](x)
        x = x + self.out(torch.tanh(self.mix[0](normed) * self.mix[1](normed)))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def pair(recipe: str, device: str, dtype: torch.dtype) -> tuple[nn.Module, ...]:
    torch.manual_seed(0)
    plain = Block(fused=False).to(device, dtype)
    return three_ways(plain, Float8LinearConfig.from_recipe_name(recipe))


COMPILED = [  # one compilation per recipe and dtype; `make test-all` and a GPU cross the two
    pytest.param(torch.float32, "tensorwise", True, id="float32-tensorwise-compiled"),
    pytest.param(torch.bfloat16, "delayed", True, id="bfloat16-delayed-compiled"),
    pytest.param(
        torch.float32, "delayed", True, id="float32-delayed-compiled", marks=pytest.mark.exhaustive
    ),
    pytest.param(
        torch.bfloat16,
        "tensorwise",
        True,
        id="bfloat16-tensorwise-compiled",
        marks=pytest.mark.exhaustive,
    ),
]


@on_devices
@pytest.mark.parametrize(
    ("dtype", "recipe", "compiled"),
    [*itertools.product((torch.float32, torch.bfloat16), RECIPES, (False,)), *COMPILED],
)
def test_as_accurate_as_layer_by_layer(
    device: str, dtype: torch.dtype, recipe: str, compiled: bool
) -> None:
    torch._dynamo.reset()
    reference, apart, fused = pair(recipe, device, dtype)
    run = torch.compile(fused, fullgraph=True) if compiled else fused
    for step in range(3):
        x, g = (seeded(step + i, 3, 11, DIM, device=device).to(dtype) for i in (0, 9))
        exact = forward_backward(reference, x.double(), g.double())
        wanted, got = forward_backward(apart, x, g), forward_backward(run, x, g)
        for name, value in wanted.items():
            mine = got[f"_orig_mod.{name}" if compiled and "." in name else name]
            assert sqnr(exact[name], mine) > sqnr(exact[name], value) - 2, name
        for model in (apart, fused):
            sync_float8_amax_and_scale_history(model)


@on_devices
def test_one_kernel_sums_the_gradients_that_meet_at_a_norm(device: str) -> None:
    _, _, fused = pair("tensorwise", device, torch.float32)
    x = seeded(0, 32, DIM, device=device).requires_grad_()
    y = fused(x)
    with OpCounter() as counter:
        y.sum().backward()
    assert counter.ops["float8.rms_norm_backward"] == 2
    assert counter.ops["aten._fused_rms_norm_backward"] == 0


@on_devices
def test_no_input_is_kept_twice(device: str) -> None:
    """Column data of norms are made again in backward, as are those of an input kept anyway."""
    _, apart, fused = pair("tensorwise", device, torch.float32)
    x = seeded(0, 32, DIM, device=device).requires_grad_()
    with saved_tensors() as of_apart:
        apart(x)
    with saved_tensors() as of_fused:
        fused(x)
    assert sum(s.dtype in (E4M3, E5M2) for s in of_apart) == 6  # one per layer
    assert not any(s.dtype in (E4M3, E5M2) for s in of_fused)


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [32, 13])
def test_keeping_the_input_changes_no_bit(device: str, recipe: str, rows: int) -> None:
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    layer = nn.Linear(DIM, 40, device=device)
    layer = convert_to_float8_training(layer, config=config, module_filter_fn=all_linears)
    other = copy.deepcopy(layer)
    x, g = seeded(0, rows, DIM, device=device), seeded(1, rows, 40, device=device)
    results = []
    for call in (layer, lambda x: linear_keeping_input(x, other)):
        mine = x.clone().requires_grad_()
        y = call(mine)
        y.backward(g)
        results.append((y, mine.grad))
    results[0] += (layer.weight.grad, layer.bias.grad)
    results[1] += (other.weight.grad, other.bias.grad)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_keeping_the_input_of_other_layers_is_calling_them() -> None:
    plain, x = nn.Linear(DIM, 40), seeded(0, 8, DIM)
    assert torch.equal(linear_keeping_input(x, plain), plain(x))
    converted = convert_to_float8_training(plain, module_filter_fn=all_linears)
    converted.forward = lambda x: x + 1
    assert torch.equal(linear_keeping_input(x, converted), x + 1)


def test_without_float8_the_residual_is_added_too() -> None:
    model = Block(fused=True)
    x = seeded(0, 8, DIM)
    wanted = copy.deepcopy(model)
    wanted.fused = False
    assert torch.allclose(model(x), wanted(x), atol=1e-6)


@on_devices
def test_a_residual_whose_branch_has_no_gradient(device: str) -> None:
    _, _, fused = pair("tensorwise", device, torch.float32)
    x = seeded(0, 16, DIM, device=device).requires_grad_()
    *_, y = rms_norm_linear(x, fused.norms[0], tuple(fused.mix), residual=True)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.ones_like(x))
    assert fused.mix[0].weight.grad is None
