"""What is undone leaves no trace: attributes of users' classes, and what DDP ignores."""

import dataclasses

import pytest
import torch
from torch import nn

from float8 import (
    Float8LinearConfig,
    Float8Tensor,
    Float8Weights,
    all_linears,
    convert_to_float8_training,
    convert_to_high_precision,
)
from support.configs import delayed

ONLY = Float8LinearConfig(float8_weights=Float8Weights.ONLY)


def ignored_by_ddp(model: nn.Module) -> list[str]:
    return getattr(model, "_ddp_params_and_buffers_to_ignore", [])


class Scaled(nn.Linear):
    scaling = 1.0

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scaling = 7.0


def test_attributes_of_a_users_class_stay() -> None:
    model = nn.Sequential(Scaled(32, 32))
    convert_to_float8_training(model, module_filter_fn=all_linears)
    assert model[0].scaling == 7.0
    convert_to_high_precision(model)
    assert type(model[0]) is Scaled
    assert model[0].scaling == 7.0


def test_ddp_ignores_only_what_is_there() -> None:
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    model._ddp_params_and_buffers_to_ignore = ["theirs"]
    convert_to_float8_training(model, config=ONLY, module_filter_fn=all_linears)
    assert ignored_by_ddp(model) == ["theirs", "0.weight"]
    convert_to_float8_training(model, config=delayed(), module_filter_fn=all_linears)
    assert "0.weight" not in ignored_by_ddp(model)
    assert "0.fp8_amax_weight" in ignored_by_ddp(model)
    convert_to_high_precision(model)
    assert ignored_by_ddp(model) == ["theirs"]


def test_weights_in_float8_only_cannot_be_lost_or_trained() -> None:
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    convert_to_float8_training(model, config=ONLY, module_filter_fn=all_linears)
    weight = model[0].weight
    with pytest.raises(TypeError, match=r"got torch\.float64 for a weight that is in float8 only"):
        model.double()
    assert model[0].weight is weight
    with pytest.raises(RuntimeError, match="take the place of float8 data"):
        weight.data = torch.zeros(32, 32)
    weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"cannot be trained; call convert_to_high_precision"):
        model(torch.randn(4, 32))


@pytest.mark.parametrize("weights", [Float8Weights.ON_THE_FLY, Float8Weights.HELD])
@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_of_float8_weights_loads_as_values(weights, assign: bool) -> None:
    frozen, trained = (nn.Sequential(nn.Linear(32, 32)) for _ in range(2))
    convert_to_float8_training(
        frozen.requires_grad_(False), config=ONLY, module_filter_fn=all_linears
    )
    config = dataclasses.replace(Float8LinearConfig(), float8_weights=weights)
    convert_to_float8_training(trained, config=config, module_filter_fn=all_linears)
    trained.load_state_dict(frozen.state_dict(), assign=assign)
    assert not isinstance(trained[0].weight, Float8Tensor)
    assert torch.equal(trained[0].weight, frozen[0].weight.to_original_precision())


def test_a_derivative_of_a_constant_gradient_is_refused_too() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    convert_to_float8_training(model, module_filter_fn=all_linears)
    x = torch.randn(4, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="expected first derivatives only"):
        gradient.square().sum().backward()
