"""The way back: layers become what they were, and what is undone leaves no trace."""

import copy

import pytest
import torch
from torch import Tensor, nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    Float8Weights,
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from support.configs import delayed, tensorwise
from support.models import seeded
from support.rings import short

ONLY = Float8LinearConfig(float8_weights=Float8Weights.ONLY)


def ignored_by_ddp(model: nn.Module) -> list[str]:
    return getattr(model, "_ddp_params_and_buffers_to_ignore", [])


class Scaled(nn.Linear):
    scaling = 1.0

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scaling = 7.0


pytestmark = pytest.mark.xdist_group("compilers")  # one worker makes them ready


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.t() + self.bias


@pytest.mark.parametrize(
    "config", short({1}, [tensorwise(), delayed()]), ids=["dynamic", "delayed"]
)
def test_it_becomes_what_it_was(config: Float8LinearConfig) -> None:
    model = nn.Sequential(Scaled(32, 16), Own(16, 16), nn.Linear(16, 16).eval())
    model[0].register_forward_hook(lambda mod, args, out: out + 1)
    model[2].weight.requires_grad_(False)
    original, x = copy.deepcopy(model), seeded(0, 4, 32)
    parameters = dict(model.named_parameters())
    convert_to_float8_training(model, config=config, linear_classes=[Own])
    assert len(conversion_report(model).converted) == 3
    layers, compiled = list(model), torch.compile(model, backend="eager")
    compiled(x).sum().backward()
    assert not torch.equal(compiled(x), original(x))
    convert_to_high_precision(compiled)
    assert torch.equal(compiled(x), original(x))
    assert [*map(type, model)] == [*map(type, original)]
    assert all(layer is converted for layer, converted in zip(model, layers, strict=True))
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == list(original.state_dict())
    left = {"_ddp_params_and_buffers_to_ignore"}  # names of buffers that are gone
    for layer, before in zip(model, original, strict=True):
        assert vars(layer).keys() - left == vars(before).keys()
    assert model[0].scaling == 7.0
    assert not model[2].training
    assert torch.equal(model(x), original(x))
    assert conversion_report(model).converted == ()
    assert convert_to_high_precision(model) is model  # nothing left to do


def test_an_optimizer_goes_on_across_the_way_back() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=delayed())
    optimizer = torch.optim.AdamW(model.parameters())
    for change in (lambda m: m, convert_to_high_precision, convert_to_float8_training):
        change(model)
        before = model[0].weight.detach().clone()
        model(seeded(0, 4, 16)).sum().backward()
        optimizer.step()
        assert not torch.equal(model[0].weight, before)
    assert optimizer.state[model[0].weight]["step"] == 3


def test_weights_to_be_gathered_in_float8_are_plain_again() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    weight = model[0].weight
    model[0].weight.note = "kept"
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config)
    assert type(model[0].weight.data) is not Tensor
    convert_to_high_precision(model)
    assert model[0].weight is model[1].weight is weight
    assert type(weight) is nn.Parameter
    assert type(weight.data) is Tensor
    assert vars(weight) == {"note": "kept"}
    convert_to_float8_training(model, config=config)
    convert_to_float8_training(model)  # without the gather
    assert type(model[0].weight.data) is Tensor


def test_what_somebody_relies_on_is_refused_before_anything_changes() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    nn.utils.parametrizations.weight_norm(model[1])
    with pytest.raises(ValueError, match=r"layer '1': got a layer that is parametrized"):
        convert_to_high_precision(model)
    assert isinstance(model[0], Float8Linear)
    with pytest.raises(TypeError, match="module: got NoneType"):
        convert_to_high_precision(None)


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
    with pytest.raises(TypeError, match=r"orig_dtype: got torch\.float64, expected one of"):
        model.double()
    assert model[0].weight is weight
    with pytest.raises(RuntimeError, match=r"take the place of what a Float8Tensor of .* holds"):
        weight.data = torch.zeros(32, 32)
    weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"cannot be trained; call convert_to_high_precision"):
        model(torch.randn(4, 32))
