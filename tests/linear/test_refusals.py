"""What torch can do with functions, and float8 cannot, is refused by name."""

import pytest
import torch
from torch import nn

import float8
from float8 import all_linears, convert_to_float8_training, convert_to_high_precision
from float8 import sync_float8_amax_and_scale_history as sync
from float8.kernels.runtime.private import functorch_levels
from support.configs import delayed, tensorwise
from support.devices import on_devices
from support.models import seeded

CONFIGS = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
NEEDS_LEVELS = pytest.mark.skipif(functorch_levels is None, reason="torch alone says so then")


def made(config, device: str = "cpu") -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 1)).to(device)
    return convert_to_float8_training(model, config=config, module_filter_fn=all_linears)


@on_devices
@CONFIGS
def test_differentiating_twice_raises(device: str, config) -> None:
    """It would silently leave the float8 layers out."""
    model, x = made(config, device), seeded(0, 8, 32, device=device)
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
            TRANSFORMS[how](made(config), seeded(0, 8, 32))


@NEEDS_LEVELS
@CONFIGS
def test_batches_of_gradients_raise(config) -> None:
    model, x = made(config), seeded(0, 8, 32).requires_grad_()
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
    model = made(delayed())
    with pytest.raises(RuntimeError, match=r"Float8Linear: got torch.jit.script, .*torch\.compile"):
        torch.jit.script(model if inside else model[0])
    sync(model)
    torch.jit.script(convert_to_high_precision(model))
