"""Inputs that are no plain tensors, and what torch can do with functions that float8 cannot."""

import io
import warnings

import pytest
import torch
from torch import nn

import float8
from float8 import (
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    all_linears,
    convert_to_float8_training,
    convert_to_high_precision,
)
from float8 import sync_float8_amax_and_scale_history as sync
from float8.kernels.runtime.private import functorch_levels
from sqnr import assert_same_bits
from support.configs import BOTH, FINER, delayed, of_recipe, tensorwise
from support.devices import on_devices
from support.errors import require_errors
from support.models import gradients, seeded
from support.modes import running
from support.rings import short


def made(config: Float8LinearConfig | str, out: int = 32, device: str = "cpu") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, out)).to(device)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


def test_other_layouts_and_no_tensors_say_what_they_are() -> None:
    model, x, parts = made("tensorwise"), seeded(0, 8, 32), [torch.ones(n, 32) for n in (2, 3)]
    nested = {
        layout: torch.nested.nested_tensor(parts, layout=layout)
        for layout in (torch.strided, torch.jagged)
    }
    trace = torch.fx.symbolic_trace
    dense = r"TypeError: got a Tensor of layout .*; call input\.to_dense\(\)"
    require_errors(
        (dense, model, [x.to_sparse()]),
        (dense, model, [x.to_sparse_csr()]),
        (dense, model, [x.to_mkldnn()]),
        ("TypeError: got a list as input, expected a dense", model, [[1, 2]]),
        (r"TypeError: got a Proxy as input, .*is_leaf_module is true for", trace, [model]),
        *(
            (rf"TypeError: of layout {layout} as input, .*input\.values\(\)", model, [x])
            for layout, x in nested.items()
        ),
    )


def layer_of(config: Float8LinearConfig) -> Float8Linear:
    torch.manual_seed(0)
    return Float8Linear.from_float(nn.Linear(24, 40), config)


@pytest.mark.parametrize("mode", short({"eager"}, ["eager", "aot_eager"]))
def test_its_bytes_are_taken(mode: str) -> None:
    """Of dims that need padding, too; gradients go to what was cast."""
    results = []
    for cast in (lambda x: x, Float8Tensor.from_high_precision):
        layer = layer_of(tensorwise())
        x, g = seeded(1, 2, 5, 24).requires_grad_(), seeded(2, 2, 5, 40)
        y = running(lambda x, layer=layer, cast=cast: layer(cast(x)), mode)(x)
        y.backward(g)
        results.append({"output": y, "input": x.grad, **gradients(layer)})
    assert_same_bits(*results)


def test_under_autocast_it_stays_as_it_is() -> None:
    x, layer = seeded(1, 4, 24, dtype=torch.bfloat16), layer_of(tensorwise())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(Float8Tensor.from_high_precision(x)), layer(x))


def test_delayed_scaling_records_its_amax() -> None:
    layer, x = layer_of(delayed()), seeded(1, 4, 24)
    cast = Float8Tensor.from_high_precision(x)
    cast._amax = x.abs().amax()
    with torch.no_grad():
        layer(cast)
    assert layer.fp8_amax_input == 0
    layer(cast)
    assert layer.fp8_amax_input == cast._amax


@pytest.mark.parametrize("recipe", FINER)
def test_a_layer_that_casts_in_another_way_refuses_it(recipe: str) -> None:
    cast = Float8Tensor.from_high_precision(seeded(1, 4, 24))
    with pytest.raises(ValueError, match=r"got input in(.)*expected(.)*to_original_precision"):
        layer_of(of_recipe(recipe))(cast)


def test_delayed_scaling_is_traced_by_torch_jit_only_where_it_records_nothing() -> None:
    model, x = made("delayed"), seeded(0, 8, 32)
    with pytest.raises(RuntimeError, match=r"got torch.jit.trace with delayed .*torch\.no_grad"):
        torch.jit.trace(model, x)
    model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a trace fixes, and that it is old
        assert torch.equal(torch.jit.trace(model, x)(2 * x), model(2 * x))


@pytest.mark.filterwarnings("ignore")  # that exporting TorchScript is old
@pytest.mark.parametrize("recipe", short({"rowwise"}, ["delayed", "rowwise"]))
def test_onnx_is_refused(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, refused = made(recipe), seeded(0, 8, 32), r"got torch\.onnx\.export, .*to_high_prec"
    with pytest.raises(RuntimeError, match=refused):
        torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False)
    # What the other exporter does, which needs packages.
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    for strict in (False, True):
        with pytest.raises(RuntimeError, match=refused):
            torch.export.export(model, (x,), strict=strict)


NEEDS_LEVELS = pytest.mark.skipif(functorch_levels is None, reason="torch alone says so then")


@on_devices
@BOTH
def test_differentiating_twice_raises(device: str, config) -> None:
    """It would silently leave the float8 layers out."""
    model, x = made(config, 1, device), seeded(0, 8, 32, device=device)
    parameters = [*model.parameters()]
    (plain, twice) = (
        torch.autograd.grad(model(x).square().sum(), parameters, create_graph=create_graph)
        for create_graph in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, twice, strict=True))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    expected = r"Float8Linear: got a derivative of a gradient .*convert_to_high_precision"
    with pytest.raises(RuntimeError, match=expected):
        torch.autograd.grad(grad.square().sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match=expected):
        grad.square().sum().backward()
    convert_to_high_precision(model)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vmap": lambda model, x: torch.vmap(model)(x[None]),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "functional": lambda model, x: torch.vmap(lambda x: float8.linear(x, x))(x[None]),
}


@NEEDS_LEVELS
@pytest.mark.parametrize("how", TRANSFORMS)
def test_transforms_of_torch_func_raise(how: str) -> None:
    for config in (tensorwise(), delayed()):
        with pytest.raises(RuntimeError, match=r"Linear: got a call within torch\.func .*backw"):
            TRANSFORMS[how](made(config, 1), seeded(0, 8, 32))


@NEEDS_LEVELS
@BOTH
def test_backward_within_vmap_raises(config) -> None:
    model, x = made(config, 1), seeded(0, 8, 32).requires_grad_()
    y, grad = model(x), torch.autograd.grad
    with pytest.raises(RuntimeError, match=r"got a backward within torch\.func .*one gradient at"):
        torch.vmap(lambda each: grad(y, x, each))(torch.ones(3, *y.shape))
    assert torch.autograd.functional.jacobian(model, x).shape == (8, 1, 8, 32)


@pytest.mark.parametrize("inside", [False, True])
def test_torch_script_raises(inside: bool) -> None:
    model = made(delayed(), 1)
    with pytest.raises(RuntimeError, match=r"Float8Linear: got torch.jit.script, .*torch\.compile"):
        torch.jit.script(model if inside else model[0])
    sync(model)
    torch.jit.script(convert_to_high_precision(model))
