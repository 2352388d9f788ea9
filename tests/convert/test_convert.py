"""Which layers of a model become `Float8Linear`, and what stays the same."""

import copy

import pytest
import torch
from torch import nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    conversion_report,
    convert_to_float8_training,
    swap_linear_with_float8_linear,
)
from support.configs import delayed, tensorwise
from support.models import FeedForward, seeded


def converted(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules(remove_duplicate=False) if type(m) is Float8Linear]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FeedForward(16, 32), FeedForward(16, 32)])
        self.by_name = nn.ModuleDict({"head": nn.Linear(16, 16)})
        self.conv = nn.Conv1d(1, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.by_name["head"](x)


ALL = [f"blocks.{b}.w{w}" for b in (0, 1) for w in (1, 2, 3)] + ["by_name.head"]


def test_all_nested_linears_are_converted_in_place() -> None:
    model = Nested()
    parameters = dict(model.named_parameters())
    assert convert_to_float8_training(model) is model
    assert converted(model) == ALL
    assert list(dict(model.named_parameters())) == list(parameters)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    model(seeded(0, 4, 16)).sum().backward()


def test_default_configuration_is_dynamic_tensorwise() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    assert model[0].config == Float8LinearConfig() == tensorwise()


def test_the_given_configuration_is_used() -> None:
    model = convert_to_float8_training(Nested(), config=delayed())
    assert {model.get_submodule(name).config for name in ALL} == {delayed()}


# ---------------------------------------------------------------- filter


def test_filter_is_called_with_each_linear_and_its_name() -> None:
    model = Nested()
    linears = {name: model.get_submodule(name) for name in ALL}
    calls = []

    def no(mod: nn.Module, fqn: str) -> bool:
        calls.append((mod, fqn))
        return False

    convert_to_float8_training(model, module_filter_fn=no)
    assert calls == [(linears[name], name) for name in ALL]
    assert converted(model) == []


def test_filter_by_name() -> None:
    model = convert_to_float8_training(
        Nested(), module_filter_fn=lambda mod, fqn: fqn.startswith("blocks.1")
    )
    assert converted(model) == ["blocks.1.w1", "blocks.1.w2", "blocks.1.w3"]


def test_filter_by_layer() -> None:
    model = convert_to_float8_training(
        Nested(), module_filter_fn=lambda mod, fqn: mod.in_features == 32
    )
    assert converted(model) == ["blocks.0.w2", "blocks.1.w2"]


# ---------------------------------------------------------------- the root


@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
def test_a_linear_as_root_is_replaced(config: Float8LinearConfig) -> None:
    linear = nn.Linear(16, 32)
    layer = convert_to_float8_training(linear, config=config)
    assert type(layer) is Float8Linear
    assert layer is not linear
    assert layer.weight is linear.weight
    assert type(linear) is nn.Linear


def test_a_linear_as_root_is_filtered_by_the_empty_name() -> None:
    linear, names = nn.Linear(16, 32), []
    result = convert_to_float8_training(
        linear, module_filter_fn=lambda mod, fqn: bool(names.append(fqn))
    )
    assert result is linear
    assert names == [""]


def test_a_model_without_linears_comes_back_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())
    before = copy.deepcopy(model.state_dict())
    assert convert_to_float8_training(model) is model
    assert list(model.state_dict()) == list(before)


# ---------------------------------------------------------------- sharing


def test_a_layer_reached_by_two_names_stays_one_layer() -> None:
    linear = nn.Linear(16, 16)
    model = nn.Sequential(linear, nn.ReLU(), nn.Sequential(linear))
    convert_to_float8_training(model, config=delayed())
    assert type(model[0]) is Float8Linear
    assert model[0] is model[2][0]


def test_the_filter_sees_a_layer_reached_by_two_names_once_by_the_first() -> None:
    linear, names = nn.Linear(16, 16), []
    model = nn.Sequential(linear, nn.ReLU(), nn.Sequential(linear))
    convert_to_float8_training(model, module_filter_fn=lambda mod, fqn: bool(names.append(fqn)))
    assert names == ["0"]
    assert converted(model) == []


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(48, 16)
            self.head = nn.Linear(16, 48, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens))

    model = convert_to_float8_training(Tied(), config=delayed())
    assert type(model.head) is Float8Linear
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == 1
    model(torch.arange(8)).sum().backward()
    assert model.embedding.weight.grad is not None


def test_two_layers_with_one_weight_stay_two_layers() -> None:
    a, b = nn.Linear(16, 16), nn.Linear(16, 16)
    b.weight = a.weight
    model = convert_to_float8_training(nn.Sequential(a, b))
    assert model[0] is not model[1]
    assert model[0].weight is model[1].weight


def test_frozen_layers_stay_frozen_and_an_earlier_optimizer_works_on() -> None:
    model = Nested()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    convert_to_float8_training(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(seeded(0, 4, 16)).sum().backward()
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if not n.startswith(("blocks.0", "conv"))}


# ---------------------------------------------------------------- what is left alone


class MyLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_what_may_not_compute_a_linear_layer_is_left_alone_and_reported() -> None:
    mine = MyLinear(16, 16)
    model = nn.Sequential(mine, nn.MultiheadAttention(16, 2), nn.Bilinear(4, 4, 4))
    out_proj = model[1].out_proj
    with pytest.warns(UserWarning, match="no layer of Sequential was converted: got a .*MyLinear"):
        convert_to_float8_training(model)
    assert model[0] is mine
    assert model[1].out_proj is out_proj
    report = conversion_report(model)
    reasons = {layer.fqn: layer.skip_reason for layer in report.skipped}
    assert reasons.keys() == {"0", "1.out_proj"}
    assert f"{__name__}.MyLinear, whose forward is not nn.Linear's" in reasons["0"]
    assert "linear_classes=[MyLinear]" in reasons["0"]
    assert "reads the weight of this one itself" in reasons["1.out_proj"]
    assert [(x.fqn, x.shape) for x in report.others] == [
        ("1.in_proj_weight", (48, 16)),
        ("2.weight", (4, 4, 4)),
    ]


def test_parametrized_linears_are_left_alone() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))
    with pytest.warns(UserWarning, match="no layer of Sequential was converted"):
        convert_to_float8_training(model)
    assert converted(model) == []
    assert "ParametrizedLinear" in conversion_report(model).skipped[0].skip_reason


def test_lazy_linears_are_left_alone() -> None:
    model = nn.Sequential(nn.LazyLinear(16))
    with pytest.warns(UserWarning, match="no layer of Sequential was converted"):
        convert_to_float8_training(model)
    assert converted(model) == []
    assert "LazyLinear" in conversion_report(model).skipped[0].skip_reason


def test_layers_that_cannot_be_padded_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10))
    convert_to_float8_training(model, config=tensorwise(pad_inner_dim=False))
    assert converted(model) == ["0"]
    assert "pad_inner_dim=True" in conversion_report(model).skipped[0].skip_reason


# ---------------------------------------------------------------- again, and in parts


def test_converting_twice_changes_nothing() -> None:
    model = convert_to_float8_training(Nested(), config=delayed())
    layers = {name: model.get_submodule(name) for name in ALL}
    convert_to_float8_training(model, config=delayed())
    assert all(model.get_submodule(name) is layers[name] for name in ALL)
    assert {layer.config for layer in layers.values()} == {delayed()}


def test_converting_again_takes_the_new_configuration_alone() -> None:
    model = convert_to_float8_training(Nested(), config=delayed())
    layers = {name: model.get_submodule(name) for name in ALL}
    parameters = dict(model.named_parameters())
    twice = []
    layers["by_name.head"].register_forward_hook(lambda *_: twice.append(1))
    assert convert_to_float8_training(model, config=tensorwise()) is model
    assert all(model.get_submodule(name) is layer for name, layer in layers.items())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert {layer.config for layer in layers.values()} == {tensorwise()}
    assert list(model.state_dict()) == list(Nested().state_dict())  # no state is left
    convert_to_float8_training(
        model, config=delayed(), module_filter_fn=lambda mod, fqn: "blocks.1" in fqn
    )
    assert {name for name, layer in layers.items() if layer.config == delayed()} == set(ALL[3:6])
    same = convert_to_float8_training(Nested(), config=delayed())
    same.load_state_dict(model.state_dict(), strict=False)
    convert_to_float8_training(model, config=delayed())
    x = seeded(0, 4, 16)
    assert torch.equal(model(x), same(x))
    assert twice == [1]


def test_converting_again_with_what_a_layer_cannot_do_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10))
    convert_to_float8_training(model, config=delayed())
    with pytest.raises(ValueError, match=r"layer '1': got a layer already .*pad_inner_dim=True"):
        convert_to_float8_training(model, config=tensorwise(pad_inner_dim=False))
    assert {layer.config for layer in model} == {delayed()}


def test_partial_conversions_with_different_configurations() -> None:
    model = Nested()
    convert_to_float8_training(
        model, config=delayed(), module_filter_fn=lambda mod, fqn: "blocks.0" in fqn
    )
    convert_to_float8_training(
        model, config=tensorwise(), module_filter_fn=lambda mod, fqn: "blocks.1" in fqn
    )
    configs = {name: model.get_submodule(name).config for name in converted(model)}
    assert configs == {n: delayed() if "blocks.0" in n else tensorwise() for n in ALL[:6]}
    assert type(model.by_name["head"]) is nn.Linear
    model(seeded(0, 4, 16)).sum().backward()


def test_swap_linear_with_float8_linear_is_the_same() -> None:
    model = Nested()
    result = swap_linear_with_float8_linear(
        model, module_filter_fn=lambda mod, fqn: "head" in fqn, config=delayed()
    )
    assert result is model
    assert converted(model) == ["by_name.head"]
    assert model.by_name["head"].config == delayed()


# ---------------------------------------------------------------- manners


@pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])
def test_converting_prints_and_warns_nothing(
    capfd: pytest.CaptureFixture, recwarn: pytest.WarningsRecorder, config: Float8LinearConfig
) -> None:
    model = convert_to_float8_training(Nested(), config=config)
    model(seeded(0, 4, 16)).sum().backward()
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_training_mode_is_kept() -> None:
    model = Nested()
    model.blocks[0].eval()
    convert_to_float8_training(model)
    assert not model.blocks[0].w1.training
    assert model.blocks[1].w1.training


def test_arguments_of_a_wrong_type() -> None:
    with pytest.raises(TypeError, match=r"module: got Tensor, expected an nn.Module"):
        convert_to_float8_training(torch.ones(1))
    with pytest.raises(TypeError, match="config: got list, expected a Float8LinearConfig"):
        convert_to_float8_training(Nested(), config=["tensorwise"])
    with pytest.raises(TypeError, match="module_filter_fn: got list, expected a function"):
        convert_to_float8_training(Nested(), module_filter_fn=["head"])


def test_the_configuration_is_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        convert_to_float8_training(Nested(), tensorwise())
