"""RMSNorm fused with what reads it, residual connections; what fused functions keep."""

import copy
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import (
    all_linears,
    convert_to_float8_training,
    rms_norm_linear,
    swiglu_feed_forward,
    sync_float8_amax_and_scale_history,
    update_float8_weights,
    why_not_fused,
)
from sqnr import sqnr
from support.configs import RECIPES, of_recipe, tensorwise
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.microbatches import with_weights
from support.models import forward_backward, fp8_state, seeded, three_ways
from support.spies import OpCounter, saved_tensors

DIM, HIDDEN = 40, 80


class Block(nn.Module):
    """Layers of one norm, of different widths, and a SwiGLU, each added to what came in."""

    def __init__(self, *, fused: bool, residual: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM, eps=1e-5) for _ in range(2))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        self.q, self.k, self.v = (nn.Linear(DIM, n, bias=False) for n in (48, 16, 16))
        self.out = nn.Linear(80, DIM, bias=False)
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.fused, self.residual = fused, residual

    def read(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v of the norm of `x`, and `x`."""
        layers = (self.q, self.k, self.v)
        if not self.fused:
            normed = self.norms[0](x)
            return *(layer(normed) for layer in layers), x
        if self.residual:
            return rms_norm_linear(x, self.norms[0], layers, residual=True)
        return *rms_norm_linear(x, self.norms[0], layers), x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, x = self.read(x)
        x = x + self.out(torch.tanh(torch.cat([q, 2 * k, v * 0.5], dim=-1)))
        layers, norm = (self.gate, self.up, self.down), self.norms[1]
        if self.fused and self.residual:
            return swiglu_feed_forward(x, *layers, norm=norm, residual=True)
        if self.fused:
            return x + swiglu_feed_forward(x, *layers, norm=norm)
        normed = norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def pair(
    recipe: str, device: str, dtype: torch.dtype = torch.float32, residual: bool = True
) -> tuple[nn.Module, ...]:
    torch.manual_seed(0)
    plain = Block(fused=False, residual=residual).to(device, dtype)
    return three_ways(plain, of_recipe(recipe))


EACH = [*itertools.product(DTYPES, RECIPES, (False, True))]
ONE = (torch.bfloat16, "delayed", True)  # `make test-all` compiles each
COMPILED = [
    pytest.param(*each, True, marks=[] if each == ONE else [pytest.mark.exhaustive])
    for each in EACH
]


@on_devices
@pytest.mark.parametrize(
    ("dtype", "recipe", "residual", "compiled"), [*((*each, False) for each in EACH), *COMPILED]
)
def test_as_accurate_as_layer_by_layer(
    device: str, dtype: torch.dtype, recipe: str, residual: bool, compiled: bool
) -> None:
    torch._dynamo.reset()
    reference, apart, fused = pair(recipe, device, dtype, residual)
    run = torch.compile(fused, fullgraph=True) if compiled else fused
    for step in range(3):
        x, g = (seeded(step + i, 3, 11, DIM, device=device).to(dtype) for i in (0, 9))
        exact = forward_backward(reference, x.double(), g.double())
        wanted, got = forward_backward(apart, x, g), forward_backward(run, x, g)
        for name, value in wanted.items():
            mine = got[f"_orig_mod.{name}" if compiled and "." in name else name]
            assert mine.dtype == value.dtype
            assert sqnr(exact[name], mine) > sqnr(exact[name], value) - 2, name
        for model in (apart, fused):
            sync_float8_amax_and_scale_history(model)
        for name, buffer in fp8_state(fused).items():
            assert torch.allclose(buffer, dict(fp8_state(apart))[name], rtol=0.05), name


@on_devices
def test_inputs_are_cast_once_and_none_is_kept_twice(device: str) -> None:
    """Column data of norms are made again in backward; one kernel sums gradients at each norm."""
    _, apart, fused = pair("tensorwise", device)
    x = seeded(0, 32, DIM, device=device).requires_grad_()
    with saved_tensors() as of_apart:
        apart(x)
    with saved_tensors() as of_fused, OpCounter() as counter:
        y = fused(x)
    float8 = [sum(s.dtype in (E4M3, E5M2) for s in saved) for saved in (of_apart, of_fused)]
    assert float8 == [7, 1]  # one per layer; that of the layer which is not fused
    assert counter.ops["float8.rms_norm_cast"] == 2
    assert counter.ops["float8.cast"] == 7 + 1  # the weights, and that layer's input
    assert counter.ops["aten.rms_norm"] == counter.ops["aten._fused_rms_norm"] == 0
    with OpCounter() as counter:
        y.sum().backward()
    assert counter.ops["float8.rms_norm_backward"] == 2
    assert counter.ops["aten._fused_rms_norm_backward"] == 0


@on_devices
@pytest.mark.parametrize("frozen", ["q", "norms", "all"])
def test_frozen_parameters(device: str, frozen: str) -> None:
    _, apart, fused = pair("tensorwise", device)
    for model in (apart, fused):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen != "all" and not name.startswith(frozen))
    x, g = seeded(0, 16, DIM, device=device), seeded(1, 16, DIM, device=device)
    wanted, got = forward_backward(apart, x, g), forward_backward(fused, x, g)
    assert got.keys() == wanted.keys()
    for name in got:
        assert sqnr(wanted[name], got[name]) > 30, name


@on_devices
def test_outputs_without_gradient(device: str) -> None:
    _, apart, fused = pair("tensorwise", device)
    grads = []
    for model in (apart, fused):
        x = seeded(0, 16, DIM, device=device).requires_grad_()
        model.read(x)[0].sum().backward()
        grads.append(x.grad)
        assert model.k.weight.grad is None  # not zeros, which an optimizer would decay
    assert sqnr(*grads) > 30
    x = seeded(0, 16, DIM, device=device).requires_grad_()
    *_, y = fused.read(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.ones_like(x))
    assert fused.k.weight.grad is None


@pytest.mark.parametrize("residual", [False, True])
def test_plain_layers_and_norms_with_hooks_are_called(residual: bool) -> None:
    model, x = Block(fused=True, residual=residual), seeded(0, 16, DIM)
    wanted = copy.deepcopy(model)
    wanted.fused = False
    assert torch.allclose(model(x), wanted(x), atol=1e-6)
    convert_to_float8_training(model, config=tensorwise())
    expected, called = model.q(model.norms[0](x)), []
    model.norms[0].register_forward_hook(lambda *_: called.append(1))
    assert torch.equal(model.read(x)[0], expected)
    assert called


FEED_FORWARD = (48, 80), (48, 80), (80, 48)


def layers(*shapes: tuple[int, int], device: str = "cpu") -> tuple[nn.Module, ...]:
    made = nn.ModuleList(nn.Linear(*shape, bias=False, device=device) for shape in shapes)
    return tuple(convert_to_float8_training(made, module_filter_fn=all_linears))


@on_devices
@pytest.mark.parametrize("fused", ["feed forward", "norm and feed forward", "norm and linear"])
def test_no_input_outlives_its_use(device: str, fused: str) -> None:
    """Not without a norm; with one, saved tensor hooks reach all that is kept.

    As activation checkpointing and offloading need it.
    """
    norm = nn.RMSNorm(48, device=device) if "norm" in fused else None
    x = seeded(0, 16, 48, device=device).requires_grad_() * 1
    alive = weakref.ref(x)

    def run(x: Tensor) -> Tensor:
        if fused == "norm and linear":
            return rms_norm_linear(x, norm, layers((48, 32), (48, 16), device=device))[0]
        return swiglu_feed_forward(x, *layers(*FEED_FORWARD, device=device), norm=norm)

    if norm is None:
        y = run(x)
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = run(x)
    del x
    assert alive() is None
    y.sum().backward()


@on_devices
def test_of_held_weights_column_data_alone_are_kept(device: str) -> None:
    model = nn.ModuleList(layers(*FEED_FORWARD, device=device))
    convert_to_float8_training(model, config=with_weights(None), module_filter_fn=all_linears)
    update_float8_weights(model)
    x = seeded(0, 16, 48, device=device).requires_grad_()
    y = swiglu_feed_forward(x, *model)
    rows = [weakref.ref(layer.held[0].operand.row.data) for layer in model]
    update_float8_weights(model)
    assert [row() for row in rows] == [None] * 3
    y.sum().backward()


@pytest.mark.parametrize("shapes", [((48, 32), (40, 32)), ((40, 32), (48, 32))])
def test_layers_that_do_not_fit_raise_as_alone(shapes) -> None:
    """Padding to 16 must not hide it."""
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 40\]"):
        rms_norm_linear(seeded(0, 4, 48), nn.RMSNorm(48), layers(*shapes))


@pytest.mark.parametrize(
    ("shapes", "residual"),
    [
        (((48, 40), (48, 40), (48, 32)), False),
        (((48, 40), (40, 40), (40, 32)), False),
        (((48, 48), (48, 40), (48, 48)), False),
        (((48, 80), (48, 80), (80, 32)), True),
    ],
)
def test_feed_forward_layers_that_do_not_fit_raise_as_alone(shapes, residual: bool) -> None:
    norm = nn.RMSNorm(48) if residual else None
    with pytest.raises((ValueError, RuntimeError), match=r"expected \[|must match"):
        swiglu_feed_forward(seeded(0, 4, 48), *layers(*shapes), norm=norm, residual=residual)


@on_devices
def test_tied_weights_are_computed_one_by_one_and_compile(device: str) -> None:
    torch._dynamo.reset()
    first, second = layers((48, 48), (48, 48), device=device)
    second.weight = first.weight
    norm = nn.RMSNorm(48, device=device)
    assert why_not_fused(first, second) == "two layers share a weight"
    x = seeded(0, 16, 48, device=device)
    run = torch.compile(
        lambda x: rms_norm_linear(x, norm, (first, second)), fullgraph=True, backend="aot_eager"
    )
    a, b = run(x)
    assert torch.equal(a, b)
