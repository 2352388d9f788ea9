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
from support.configs import FINER, delayed, of_recipe, tensorwise
from support.devices import on_devices
from support.models import seeded


def made(recipe: str, *parts: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*(parts or (nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))))
    convert_to_float8_training(model, config=recipe, module_filter_fn=all_linears)
    return model


@pytest.mark.parametrize("layout", ["sparse", "sparse_csr", "mkldnn"])
def test_other_layouts_say_what_to_do(layout: str) -> None:
    x = getattr(seeded(0, 8, 32), f"to_{layout}")()
    with pytest.raises(TypeError, match=r"got a Tensor of layout .*; call input\.to_dense\(\)"):
        made("tensorwise")(x)


def test_no_tensors_say_what_they_are() -> None:
    model = made("tensorwise")
    with pytest.raises(TypeError, match="got a list as input, expected a dense tensor"):
        model([1, 2])
    with pytest.raises(
        TypeError, match=r"got a Proxy as input, .*is_leaf_module is true for Float8Linear"
    ):
        torch.fx.symbolic_trace(model)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)], layout=layout)
        with pytest.raises(TypeError, match=rf"of layout {layout} as input, .*input\.values\(\)"):
            model(nested)


def layer_of(config: Float8LinearConfig) -> Float8Linear:
    torch.manual_seed(0)
    return Float8Linear.from_float(nn.Linear(24, 40), config)


@pytest.mark.parametrize("compiled", [False, True])
def test_its_bytes_are_taken(compiled: bool) -> None:
    """Of dims that need padding, too; gradients go to what was cast."""
    results = []
    for cast in (False, True):
        layer = layer_of(tensorwise())
        x, g = seeded(1, 2, 5, 24).requires_grad_(), seeded(2, 2, 5, 40)

        def run(x, layer=layer, cast=cast):
            return layer(Float8Tensor.from_high_precision(x) if cast else x)

        whole = compiled and cast
        y = torch.compile(run, fullgraph=True, backend="aot_eager")(x) if whole else run(x)
        y.backward(g)
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


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
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_onnx_is_refused(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, refused = made(recipe), seeded(0, 8, 32), r"got torch\.onnx\.export, .*to_high_prec"
    with pytest.raises(RuntimeError, match=refused):
        torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False)
    # What the other exporter does, which needs packages.
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    for strict in (False, True):
        with pytest.raises(RuntimeError, match=refused):
            torch.export.export(model, (x,), strict=strict)


CONFIGS = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
NEEDS_LEVELS = pytest.mark.skipif(functorch_levels is None, reason="torch alone says so then")


def all_of(config, device: str = "cpu") -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 1)).to(device)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


@on_devices
@CONFIGS
def test_differentiating_twice_raises(device: str, config) -> None:
    """It would silently leave the float8 layers out."""
    model, x = all_of(config, device), seeded(0, 8, 32, device=device)
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
            TRANSFORMS[how](all_of(config), seeded(0, 8, 32))


@NEEDS_LEVELS
@CONFIGS
def test_batches_of_gradients_raise(config) -> None:
    model, x = all_of(config), seeded(0, 8, 32).requires_grad_()
    y, jacobian = model(x), torch.autograd.functional.jacobian
    message = r"Float8Linear: got a backward within torch\.func .*one gradient at a time"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(y, x, torch.ones(3, *y.shape), is_grads_batched=True)
    with pytest.raises(RuntimeError, match=message):
        torch.vmap(lambda grad: torch.autograd.grad(y, x, grad))(torch.ones(3, *y.shape))
    with pytest.raises(RuntimeError, match=message):
        jacobian(model, x, vectorize=True)
    assert jacobian(model, x).shape == (8, 1, 8, 32)


@pytest.mark.parametrize("inside", [False, True])
def test_torch_script_raises(inside: bool) -> None:
    model = all_of(delayed())
    with pytest.raises(RuntimeError, match=r"Float8Linear: got torch.jit.script, .*torch\.compile"):
        torch.jit.script(model if inside else model[0])
    sync(model)
    torch.jit.script(convert_to_high_precision(model))
