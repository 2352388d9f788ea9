"""Subclasses of `nn.Linear`: which convert, and what they stay."""

import copy
import re
from typing import Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    all_linears,
    attach_to_optimizer,
    conversion_report,
    convert_to_float8_training,
)
from float8.linear.base import PREFIX
from float8.linear.source import PUBLIC
from sqnr import assert_same_bits
from support.configs import BOTH, delayed
from support.copies import COPIES
from support.microbatches import HELD
from support.models import forward_backward, seeded
from support.stacks import step


class Scaled(nn.Linear):
    """No forward of its own, but all else."""

    kind = "scaled"

    def __init__(self, K: int, N: int, std: float = 0.5) -> None:
        self.std = std
        super().__init__(K, N)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)

    @property
    def fan(self) -> int:
        return self.in_features

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, std={self.std}"


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class DoubledOutside(nn.Linear):
    def __call__(self, input: Tensor) -> Tensor:
        return super().__call__(input) * 2


class Plain(Doubled):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.t() + self.bias


@BOTH
def test_a_subclass_without_a_forward_converts_and_stays_one(config: Float8LinearConfig) -> None:
    model, same = nn.Sequential(Scaled(32, 16)), nn.Sequential(nn.Linear(32, 16))
    same.load_state_dict(model.state_dict())
    weight = model[0].weight
    convert_to_float8_training(model, config=config)
    convert_to_float8_training(same, config=config)
    layer = model[0]
    assert isinstance(layer, Float8Linear)
    assert isinstance(layer, Scaled)
    assert layer.weight is weight
    assert (layer.kind, layer.std, layer.fan) == ("scaled", 0.5, 32)
    assert repr(layer).startswith("Float8Linear[Scaled](in_features=32, out_features=16, bias=True")
    assert "std=0.5" in repr(layer)
    assert len(conversion_report(model).converted) == 1
    for _ in range(2):
        assert_same_bits(step(model, 0, sync=False), step(same, 0, sync=False))
    for copied in COPIES.values():
        again = copied(model)
        assert type(again[0]) is type(layer)
        assert again[0].weight is not weight
        assert_same_bits(again.state_dict(), model.state_dict())
        assert_same_bits(step(again, 0, sync=False), step(model, 0, sync=False))
    layer.reset_parameters()
    assert not layer.bias.any()


def test_layers_of_one_class_have_one_class() -> None:
    """So compiled code is made once for all of them."""
    model = convert_to_float8_training(nn.Sequential(Scaled(16, 16), Scaled(16, 16), Of(16, 16)))
    assert type(model[0]) is type(model[1])
    assert isinstance(model[2], Of)
    assert isinstance(model[2], Float8Linear)
    counter = CompileCounterWithBackend("eager")
    for layer in model[:2]:
        layer.compile(backend=counter, fullgraph=True)
    model(seeded(0, 4, 16).requires_grad_()).sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize("cls", [Doubled, DoubledOutside])
def test_a_subclass_with_a_forward_of_its_own_says_how_to_ask_for_it(cls: type) -> None:
    model = nn.Sequential(cls(16, 16), nn.Linear(16, 16))
    convert_to_float8_training(model, module_filter_fn=all_linears)
    assert type(model[0]) is cls
    (layer,) = conversion_report(model).skipped
    assert f"got a {__name__}.{cls.__name__}, whose forward is not" in layer.skip_reason
    assert f"linear_classes=[{cls.__name__}]" in layer.skip_reason


def test_a_subclass_with_a_forward_of_its_own_converts_on_request() -> None:
    mine, linear = Plain(32, 16), nn.Linear(32, 16)
    linear.load_state_dict(mine.state_dict())
    model = convert_to_float8_training(
        nn.Sequential(mine, Doubled(16, 16)), linear_classes=iter([Plain])
    )
    assert isinstance(model[0], Plain)
    assert type(model[1]) is Doubled
    x = seeded(0, 4, 32)
    assert torch.equal(model[0](x), convert_to_float8_training(linear)(x))
    with pytest.raises(TypeError, match="whose forward is not"):
        Float8Linear.from_float(Plain(32, 16))


def test_linear_classes_of_a_wrong_type() -> None:
    for wrong in ([nn.ReLU], ["Linear"], [nn.Linear(1, 1)], Plain):
        with pytest.raises(TypeError, match=r"linear_classes: got .*expected a list of subclasses"):
            convert_to_float8_training(nn.Linear(16, 16), linear_classes=wrong)


KINDS = {
    "attribute": lambda name: f"their {name}",
    "class": lambda name: f"their {name}",
    "buffer": lambda name: nn.Buffer(torch.ones(1)),
    "parameter": lambda name: nn.Parameter(torch.ones(1)),
    "module": lambda name: nn.Identity(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_we_need_is_taken_by_anything(kind: str) -> None:
    for name in ("_float8_plan", "fp8_scale_input"):

        class Mine(nn.Linear):
            pass

        model, theirs = nn.Sequential(nn.Linear(16, 16), Mine(16, 16)), KINDS[kind](name)
        setattr(Mine if kind == "class" else model[1], name, theirs)
        convert_to_float8_training(model, config=delayed())
        assert isinstance(model[0], Float8Linear)
        assert type(model[1]) is Mine
        assert getattr(model[1], name) is theirs
        (layer,) = conversion_report(model).skipped
        assert f"with an attribute '{name}', expected one without" in layer.skip_reason


def test_a_config_of_the_user_is_the_users() -> None:
    """As an argument of its class, and as what a compiled model reads."""

    class Mine(nn.Linear):
        def __init__(self, K: int, N: int, config: dict) -> None:
            super().__init__(K, N)
            self.config, self.rank = nn.Parameter(torch.ones(N)), config["rank"]

        def again(self) -> "Mine":
            return type(self)(self.in_features, self.out_features, config={"rank": self.rank})

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Mine(16, 16, {"rank": 3})

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.layer.config

    model = convert_to_float8_training(Scaling())
    assert isinstance(model.layer, Float8Linear)
    assert (model.layer.again().rank, type(model.layer.again())) == (3, type(model.layer))
    x = seeded(0, 8, 16)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("config", [delayed(), Float8LinearConfig(float8_weights=HELD)])
def test_our_names_have_one_prefix(config: Float8LinearConfig) -> None:
    """But for two that a user's own hide, buffers, and what torch reads. So names of users stay."""
    layer = convert_to_float8_training(nn.Linear(16, 16), config=config)
    attach_to_optimizer(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    forward_backward(layer, seeded(0, 4, 16), seeded(1, 4, 16))
    torches = {"__prepare_scriptable__", "_ddp_params_and_buffers_to_ignore"}
    ours = {*dir(layer)} - {*dir(nn.Linear(16, 16))} - torches
    assert {name for name in ours if not name.startswith((PREFIX, "fp8_"))} == {*PUBLIC}
    assert layer.config == config


def test_a_name_that_only_the_next_recipe_needs() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].fp8_scale_input = "theirs"
    convert_to_float8_training(model)
    assert len(conversion_report(model).converted) == 2
    with pytest.raises(ValueError, match=r"layer '1'.*with an attribute 'fp8_scale_input'"):
        convert_to_float8_training(model, config=delayed())
    assert [layer.config for layer in model] == [Float8LinearConfig()] * 2
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


class Slotted(nn.Linear):
    __slots__ = ("extra",)


class PicklesItself:
    def __getstate__(self) -> dict:
        return {**vars(self), "more": 1}


class Pickled(nn.Linear, PicklesItself):
    pass


class Of(nn.Linear, Generic[TypeVar("T")]):
    """`Generic` has empty slots."""


class OfFirst(Generic[TypeVar("T")], nn.Linear):
    """Objects of it lie otherwise in memory."""


class NeedsAKind(nn.Linear):
    def __init_subclass__(cls, *, kind: str) -> None:
        pass


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Slotted, "with '__slots__', expected one without"),
        (Pickled, "with '__getstate__', expected one without"),
        (OfFirst, "cannot be a Float8Linear, too: .*object layout differs"),
        (NeedsAKind, "cannot be a Float8Linear, too: .*required keyword-only argument: 'kind'"),
    ],
)
def test_classes_that_cannot_be_combined_with_ours_stay(cls: type, reason: str) -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), cls(16, 16)))
    assert type(model[1]) is cls
    (layer,) = conversion_report(model).skipped
    assert re.search(reason, layer.skip_reason)


def test_a_conversion_that_fails_changes_nothing() -> None:
    class Fails(nn.Linear):
        def register_buffer(self, *args: object, **more: object) -> None:
            raise OSError("no buffers today")

    model = nn.Sequential(nn.Linear(16, 16), Fails(16, 16))

    def state() -> list[object]:
        return [(type(x), {k: copy.copy(v) for k, v in vars(x).items()}) for x in model]

    before = state()
    with pytest.raises(OSError, match="no buffers"):
        convert_to_float8_training(model, config=delayed())
    assert str(state()) == str(before)


@BOTH
def test_a_converted_class_is_called_as_the_original(config: Float8LinearConfig) -> None:
    layer = convert_to_float8_training(Scaled(32, 16), config=config)
    torch.manual_seed(0)
    new = type(layer)(32, 16, std=0.25, config=config)
    torch.manual_seed(0)
    same = convert_to_float8_training(Scaled(32, 16, std=0.25), config=config)
    assert (type(new), new.std, new.config) == (type(layer), 0.25, config)
    x = seeded(0, 4, 32)
    assert torch.equal(new(x), same(x))
    assert type(layer)(32, 16).config == Float8LinearConfig()


@BOTH
def test_hooks_are_called_also_those_that_are_methods_of_the_layer(
    config: Float8LinearConfig,
) -> None:
    class Counting(nn.Linear):
        calls = loads = 0

        def count(self, *_: object) -> None:
            self.calls += 1

        def count_loads(self, *_: object) -> None:
            self.loads += 1

    layer = Counting(16, 16)
    backward: list[str] = []
    layer.register_full_backward_hook(lambda *_: backward.append("layer"))
    layer.weight.register_hook(lambda _: backward.append("weight"))
    handle = layer.register_forward_hook(layer.count)
    layer.register_forward_pre_hook(layer.count)
    layer.register_load_state_dict_pre_hook(layer.count_loads)
    convert_to_float8_training(layer, config=config)
    layer(seeded(0, 4, 16))
    layer.load_state_dict(layer.state_dict())
    assert (layer.calls, layer.loads) == (2, 1)
    handle.remove()
    layer(seeded(0, 4, 16).requires_grad_()).sum().backward()
    assert layer.calls == 3
    assert sorted(backward) == ["layer", "weight"]


def test_no_class_is_to_be_named_for_weights_that_others_have_changed() -> None:
    quantised, apart = Doubled(16, 16), nn.Linear(16, 16)
    quantised.weight = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
    apart.weight = nn.Parameter(torch.empty(0))
    apart.weight.ds_shape = (16, 16)  # DeepSpeed's
    model = nn.Sequential(quantised, apart, nn.Linear(16, 16))
    first, second = conversion_report(convert_to_float8_training(model)).skipped
    assert "Doubled, with a weight of dtype torch.int8, expected one of" in first.skip_reason
    assert "linear_classes=" not in first.skip_reason
    assert "within deepspeed.zero.GatheredParameters" in second.skip_reason
