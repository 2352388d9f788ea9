"""RMSNorm fused with the layers that read it."""

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    rms_norm_linear,
    sync_float8_amax_and_scale_history,
)
from sqnr import sqnr
from support.configs import RECIPES, tensorwise
from support.devices import DTYPES, on_devices
from support.models import forward_backward, fp8_state, seeded, three_ways
from support.spies import OpCounter


class Attention(nn.Module):
    """q, k and v of different widths, mixed so that each output has a gradient of its own."""

    def __init__(self, dim: int, *, fused: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        self.q, self.k, self.v = (nn.Linear(dim, n, bias=False) for n in (48, 16, 16))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.q, self.k, self.v)
        if self.fused:
            q, k, v = rms_norm_linear(x, self.norm, layers)
        else:
            normed = self.norm(x)
            q, k, v = (layer(normed) for layer in layers)
        return torch.cat([q, 2 * k, v * 0.5], dim=-1)


def pair(dim: int, recipe: str, device: str, dtype: torch.dtype) -> tuple[nn.Module, ...]:
    torch.manual_seed(0)
    plain = Attention(dim, fused=False).to(device, dtype)
    return three_ways(plain, Float8LinearConfig.from_recipe_name(recipe))


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("leading", "dim"), [((32,), 64), ((3, 11), 40)])
def test_as_accurate_as_layer_by_layer(
    device: str, leading: tuple[int, ...], dim: int, dtype: torch.dtype, recipe: str
) -> None:
    reference, apart, fused = pair(dim, recipe, device, dtype)
    for step in range(3):
        x = seeded(step, *leading, dim, device=device).to(dtype)
        g = seeded(step + 9, *leading, 80, device=device).to(dtype)
        exact = forward_backward(reference, x.double(), g.double())
        wanted, got = forward_backward(apart, x, g), forward_backward(fused, x, g)
        assert got.keys() == wanted.keys()
        for name, value in got.items():
            assert value.dtype == wanted[name].dtype
            assert sqnr(exact[name], value) > sqnr(exact[name], wanted[name]) - 2, name
        for model in (apart, fused):
            sync_float8_amax_and_scale_history(model)
        for name, buffer in fp8_state(fused).items():
            assert torch.allclose(buffer, dict(fp8_state(apart))[name], rtol=0.05), name


@on_devices
def test_one_cast_of_the_input(device: str) -> None:
    _, _, fused = pair(32, "tensorwise", device, torch.float32)
    with OpCounter() as counter:
        fused(seeded(0, 16, 32, device=device))
    assert counter.ops["float8.rms_norm_cast"] == 1
    assert counter.ops["float8.cast_dynamic"] == 3  # the weights
    assert counter.ops["aten.rms_norm"] == counter.ops["aten._fused_rms_norm"] == 0


@on_devices
@pytest.mark.parametrize("frozen", ["q", "norm", "all"])
def test_frozen_parameters(device: str, frozen: str) -> None:
    _, apart, fused = pair(32, "tensorwise", device, torch.float32)
    for model in (apart, fused):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen != "all" and not name.startswith(frozen))
    x, g = seeded(0, 16, 32, device=device), seeded(1, 16, 80, device=device)
    wanted, got = forward_backward(apart, x, g), forward_backward(fused, x, g)
    assert got.keys() == wanted.keys()
    for name in got:
        assert sqnr(wanted[name], got[name]) > 30, name


@on_devices
def test_an_output_without_gradient(device: str) -> None:
    _, apart, fused = pair(32, "tensorwise", device, torch.float32)
    grads = []
    for model in (apart, fused):
        x = seeded(0, 16, 32, device=device).requires_grad_()
        if model is fused:
            q, _, _ = rms_norm_linear(x, model.norm, (model.q, model.k, model.v))
        else:
            q = model.q(model.norm(x))
        q.sum().backward()
        grads.append(x.grad)
        assert model.k.weight.grad is None  # not zeros, which an optimizer would decay
    assert sqnr(*grads) > 30


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_in_one_graph(device: str, recipe: str) -> None:
    torch._dynamo.reset()
    reference, _, fused = pair(64, recipe, device, torch.bfloat16)
    x, g = (seeded(i, 32, n, dtype=torch.bfloat16, device=device) for i, n in ((0, 64), (1, 80)))
    exact = forward_backward(reference, x.double(), g.double())
    got = forward_backward(torch.compile(fused, fullgraph=True), x, g)
    for name, value in got.items():
        assert sqnr(exact[name.removeprefix("_orig_mod.")], value) > 20, name


def test_plain_layers_and_norms_with_hooks_are_called() -> None:
    model, x = Attention(32, fused=True), seeded(0, 16, 32)
    normed = model.norm(x)
    assert torch.equal(model(x)[:, :48], model.q(normed))
    convert_to_float8_training(model, config=tensorwise())
    called = []
    model.norm.register_forward_hook(lambda *_: called.append(1))
    assert torch.equal(model(x)[:, :48], model.q(normed))
    assert called
