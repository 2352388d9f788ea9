"""Which layers of a model become `Float8Linear`, what stays the same; on the meta device."""

from functools import partial

import pytest
import torch
from torch import nn

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    swap_linear_with_float8_linear,
)
from support.configs import BOTH, delayed, tensorwise
from support.devices import on_devices
from support.errors import require_errors
from support.models import FeedForward, fp8_state, seeded
from support.stacks import step


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


@BOTH
def test_all_nested_linears_are_converted_in_place(
    config: Float8LinearConfig, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    model = Nested()
    model.blocks[0].eval()
    model.blocks[1].requires_grad_(False)
    parts = {name: (part, part.training) for name, part in model.named_modules()}
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert convert_to_float8_training(model, config=config) is model
    assert converted(model) == ALL
    assert {model.get_submodule(name).config for name in ALL} == {config}
    assert {name: (part, part.training) for name, part in model.named_modules()} == parts
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(seeded(0, 4, 16)).sum().backward()
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if n.startswith(("blocks.0", "by_name"))}
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_filter_is_called_once_for_each_linear_with_its_name() -> None:
    model, calls = Nested(), []
    model.again = head = model.by_name["head"]
    linears = {name: model.get_submodule(name) for name in ALL}
    convert_to_float8_training(model, module_filter_fn=lambda *call: calls.append(call))
    assert calls == [(linears[name], name) for name in ALL]
    assert converted(model) == []
    convert_to_float8_training(model, module_filter_fn=lambda mod, fqn: mod is head)
    assert converted(model) == ["by_name.head", "again"]
    assert model.again is model.by_name["head"] is head


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


def test_arguments_of_a_wrong_type() -> None:
    convert = swap_linear_with_float8_linear  # as float8_experimental called it
    assert convert is convert_to_float8_training
    filtered, configured = partial(convert, module_filter_fn=[]), partial(convert, config=[])
    require_errors(
        ("TypeError: module: got Tensor, expected an nn.Module", convert, [torch.ones(1)]),
        ("TypeError: config: got list, expected a Float8LinearC", configured, [Nested()]),
        ("TypeError: module_filter_fn: got list, expected a fun", filtered, [Nested()]),
    )


ON_META = pytest.mark.parametrize(
    "config",
    [tensorwise(), delayed(), delayed(enable_amax_init=False)],
    ids=["dynamic", "delayed", "delayed-from-one"],
)


def on_meta(config: Float8LinearConfig) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 17))
    return convert_to_float8_training(model, config=config)


@on_devices
@ON_META
@pytest.mark.parametrize("reset", [False, True], ids=["to_empty", "to_empty-and-reset"])
def test_to_empty_gives_valid_state(device: str, config: Float8LinearConfig, reset: bool) -> None:
    model = on_meta(config).to_empty(device=device)
    for layer in model:
        if reset:
            layer.reset_parameters()
        else:
            nn.init.normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    fresh = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 17))
    expected = fp8_state(convert_to_float8_training(fresh, config=config))
    assert fp8_state(model).keys() == expected.keys()
    for name, buffer in fp8_state(model).items():
        assert torch.equal(buffer.cpu(), expected[name]), name
    for seed in range(2):
        assert all(bool(result.isfinite().all()) for result in step(model, seed).values())


@ON_META
@pytest.mark.parametrize("autocast", [False, True])
def test_forward_on_meta_gives_shape_and_dtype(config: Float8LinearConfig, autocast: bool) -> None:
    model = on_meta(config)
    assert all(type(layer) is Float8Linear for layer in model)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(torch.empty(2, 3, 32, device="meta"))
    assert y.shape == (2, 3, 17)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert model[0].weight.grad.shape == (48, 32)


def test_emptied_buffers_of_a_weight_that_came_first_are_as_new() -> None:
    model = on_meta(delayed())
    for layer in model:
        layer.weight, layer.bias = (
            nn.Parameter(torch.randn(p.shape)) for p in (layer.weight, layer.bias)
        )
    new = fp8_state(convert_to_float8_training(nn.Linear(16, 16), config=delayed()))
    for name, x in fp8_state(model.to_empty(device="cpu")).items():
        assert torch.equal(x, new[name.rpartition(".")[2]]), name
