"""A `Float8Linear` made from an `nn.Linear` shares all of it."""

import pytest
import torch
from torch import nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    attach_to_optimizer,
    conversion_report,
    convert_to_float8_training,
)
from float8.linear import unsupported
from support.configs import BOTH, DELAYED, DISABLED, DYNAMIC, mixed, of_recipe, tensorwise
from support.devices import DTYPES, on_devices
from support.errors import require_errors
from support.models import seeded


class Mine(Float8Linear):
    """As a user may derive it."""


@on_devices
@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("flag", [False, True])
def test_parameters_and_the_training_mode_are_shared(
    device: str, flag: bool, bias: bool, dtype: torch.dtype, config: Float8LinearConfig
) -> None:
    linear = nn.Linear(32, 16, bias=bias, device=device, dtype=dtype)
    linear.requires_grad_(flag).train(flag)
    x = torch.ones(4, 32, device=device, dtype=dtype)
    before, names = linear(x), [name for name, _ in linear.named_parameters()]
    assert type(Mine(32, 16)) is Mine
    layer = Mine.from_float(linear, config)
    assert type(layer) is Mine
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert type(layer.weight) is nn.Parameter
    assert [name for name, _ in layer.named_parameters()] == names
    assert layer.weight.requires_grad == layer.training == flag
    assert layer(x).dtype == dtype
    # The original layer stays as it was.
    assert type(linear) is nn.Linear
    assert list(linear.state_dict()) == names
    assert torch.equal(linear(x), before)


def add_hooks(layer: nn.Module, calls: list[nn.Module]) -> None:
    layer.register_forward_hook(lambda mod, args, out: calls.append(mod))
    layer.register_forward_pre_hook(lambda mod, args: calls.append(mod))
    layer.register_full_backward_hook(lambda mod, gi, go: calls.append(mod))


def set_parameters(layer: nn.Module, calls: object) -> None:
    layer.weight = nn.Parameter(torch.zeros(16, 32))
    layer.extra = nn.Parameter(torch.zeros(1))


def set_others(layer: nn.Module, calls: object) -> None:
    layer.register_buffer("mask", torch.zeros(1), persistent=False)
    layer.adapter = nn.Linear(1, 1)


@pytest.mark.parametrize("change", [add_hooks, set_parameters, set_others])
def test_later_changes_of_one_do_not_show_in_the_other(change) -> None:
    for backwards in (False, True):
        linear = nn.Linear(32, 16)
        linear.register_forward_hook(lambda mod, args, out: out)
        both = linear, Float8Linear.from_float(linear)
        changed, other = both[::-1] if backwards else both
        names = dir(other), list(other.state_dict())
        calls: list[nn.Module] = []
        change(changed, calls)
        assert (dir(other), list(other.state_dict())) == names
        other(seeded(0, 4, 32).requires_grad_()).sum().backward()
        assert calls == []
        assert (other.weight is changed.weight) == (change is not set_parameters)


def test_what_the_original_layer_has_is_the_new_ones_too() -> None:
    """Handles of its hooks stay its own; weight norm is followed, which is one of them."""
    linear, x = nn.Linear(32, 16, bias=False), seeded(0, 4, 32)
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(linear)
    linear.layer_index = 7
    linear.register_buffer("mask", torch.ones(3))
    doubled = linear.register_forward_hook(lambda mod, args, out: out * 2)
    layer = Float8Linear.from_float(linear)
    assert layer.layer_index == 7
    assert layer.mask is linear.mask
    before, twice = linear(x), layer(x)
    doubled.remove()
    assert torch.equal(linear(x) * 2, before)
    assert torch.equal(layer(x), twice)
    with torch.no_grad():
        layer.weight_g.fill_(0)
    assert layer(x).abs().max() == 0
    layer(x).sum().backward()
    assert layer.weight_g.grad is not None


def test_a_compiled_layer_is_compiled_anew_and_its_copy_is_not_compiled() -> None:
    linear, x = nn.Linear(32, 16), seeded(0, 4, 32)
    linear.compile(backend="eager")
    before, made = linear(x), Float8Linear.from_float(linear)
    assert made._compiled_call_impl is None
    convert_to_float8_training(linear)
    assert linear._compiled_call_impl is not None
    assert torch.equal(linear(x), made(x))
    assert not torch.equal(linear(x), before)


class MyLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_what_convert_leaves_alone_is_refused_for_the_same_reason() -> None:
    for mod in (
        MyLinear(32, 16),
        nn.LazyLinear(16),
        nn.utils.parametrizations.weight_norm(nn.Linear(32, 16)),
        nn.utils.parametrizations.weight_norm(Float8Linear(32, 16)),
        nn.MultiheadAttention(16, 2).out_proj,
    ):
        expected = rf"got a [\w.]+\.{type(mod).__name__}, .*expected an nn.Linear"
        with pytest.raises(TypeError, match=expected):
            Float8Linear.from_float(mod)
        if not isinstance(mod, Float8Linear):
            model = convert_to_float8_training(nn.Sequential(mod))
            assert conversion_report(model).skipped[0].skip_reason == unsupported(mod, tensorwise())


@pytest.mark.filterwarnings("ignore:.*zero-element")
def test_what_is_refused() -> None:
    own, double = nn.Linear(32, 16), nn.Linear(16, 16).double()
    own.forward = lambda x: x  # it would silently win over the float8 one
    made = Float8Linear.from_float
    require_errors(
        ("ValueError: (?s)got .*forward.*expected", made, [own]),
        ("TypeError: got a ReLU, expected an nn.Linear", made, [nn.ReLU()]),
        ("TypeError: config: got dict, expected a Float8LinearConfig", made, [nn.Linear(1, 1), {}]),
        ("TypeError: dtype torch.float64, expected one", made, [double]),
        ("ValueError: expected no empty dim", Float8Linear, (0, 16)),
        ("ValueError: expected no empty dim", Float8Linear, (16, 0)),
    )


def test_repr_shows_the_scaling_of_each_role_second_uses_and_switches() -> None:
    def shown(config: Float8LinearConfig, bias: bool = True) -> str:
        text = repr(Float8Linear(32, 16, bias, config=config))
        start = f"Float8Linear(in_features=32, out_features=16, bias={bias}, "
        assert text.startswith(start)
        return text.removeprefix(start)

    roles = "input=dynamic/e4m3, weight=delayed/e4m3, grad_output=dynamic/e5m2)"
    assert shown(mixed(DYNAMIC, DELAYED, DYNAMIC)) == roles
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=DISABLED,
        cast_config_grad_output_for_grad_weight=DISABLED,
        emulate=True,
        round_scales_to_power_of_2=True,
    )
    assert "input_for_grad_weight=high precision" in shown(config)
    assert "grad_output_for_grad_weight=high precision" in shown(config)
    assert shown(config).endswith("emulate, round_scales_to_power_of_2)")
    assert shown(of_recipe("delayed", emulate=True), bias=False) == "delayed, emulate)"


def test_a_layer_made_of_an_attached_one_is_not_attached() -> None:
    """Else it would never miss a sync."""
    old = Float8Linear(32, 32, config="delayed")
    attach_to_optimizer(old, torch.optim.SGD(old.parameters(), lr=0.1))
    new = Float8Linear.from_float(old, "delayed")
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1)
    new(torch.ones(4, 32)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="delayed scaling was not synced"):
        new(torch.ones(4, 32))
