"""Which layers are converted without a filter: those that float8 makes no slower."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    Float8Weights,
    ScalingType,
    all_linears,
    conversion_report,
    convert_to_float8_training,
)
from float8.convert import filters, smallest
from float8.convert.measure import LinearTimes
from float8.convert.smallest import Smallest, judged_as

# Not what tests/conftest.py replaces.
KNOWN_GPU = filters.known_gpu


def model(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return nn.ModuleDict({"large": nn.Linear(8192, 8192), "small": nn.Linear(512, 512)})


def is_float8(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, Float8Linear)]


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dict.fromkeys(smallest.SMALLEST["H100"], Smallest(2048, 16384, 1e12))
    limits |= {"tensorwise": Smallest(1024, 640, 32e9), "delayed": Smallest(1024, 512, 1e9)}
    monkeypatch.setattr(smallest, "SMALLEST", {"H100": limits})
    monkeypatch.setattr(filters, "known_gpu", lambda device: "H100")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("on_h100")
def test_slower_layers_stay_and_the_report_says_why() -> None:
    converted = convert_to_float8_training(model())
    assert is_float8(converted) == ["large"]
    (skipped,) = conversion_report(converted).skipped
    assert skipped.fqn == "small"
    assert skipped.skip_reason == "K=512 is less than 640: tensorwise is slower there on H100"


@pytest.mark.usefixtures("on_h100")
def test_each_recipe_has_limits_of_its_own() -> None:
    assert is_float8(convert_to_float8_training(model(), config="delayed")) == ["large", "small"]
    with pytest.warns(UserWarning, match="K=8192 is less than 1.638e.04: rowwise is slower"):
        convert_to_float8_training(model(), config="rowwise")


@pytest.mark.parametrize("recipe", [recipe.value for recipe in Float8LinearRecipeName])
def test_a_config_is_judged_as_the_recipe_that_it_is_like(recipe: str) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)
    more = {"float8_weights": Float8Weights.HELD} if recipe != "rowwise_with_gw_hp" else {}
    assert judged_as(dataclasses.replace(config, pad_inner_dim=False, **more)) == recipe
    if recipe == "delayed":  # the weight is the smallest part
        assert judged_as(dataclasses.replace(config, cast_config_weight=CastConfig())) == recipe


@pytest.mark.usefixtures("on_h100")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"tokens_per_step": 16}, []),
        ({"module_filter_fn": all_linears}, ["large", "small"]),  # decides alone
        ({"config": Float8LinearConfig(emulate=True)}, ["large", "small"]),  # not about speed
    ],
)
def test_what_else_decides(arguments: dict[str, Any], expected: list[str]) -> None:
    assert is_float8(convert_to_float8_training(model(), **arguments)) == expected


@pytest.mark.usefixtures("on_h100")
def test_a_config_without_float8_is_not_about_speed_either() -> None:
    disabled = CastConfig(scaling_type=ScalingType.DISABLED)
    config = Float8LinearConfig(
        **{f"cast_config_{role}": disabled for role in ("input", "weight", "grad_output")}
    )
    (_, small) = conversion_report(convert_to_float8_training(model(), config=config)).layers
    assert small.skip_reason == "all casts of its config are DISABLED"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "H200"),
        ("NVIDIA H20", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
@pytest.mark.parametrize("device", ["cuda:0", "cpu", "meta"])
def test_gpus_are_known_by_name(
    device: str, name: str, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert KNOWN_GPU(torch.device(device)) == known


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_none_is_known() -> None:
    assert KNOWN_GPU(torch.device("cpu")) is None
    assert KNOWN_GPU(torch.device("meta")) is None


@pytest.mark.usefixtures("on_h100")
def test_a_layer_that_cannot_be_converted_says_so_and_not_how_slow_it_is() -> None:
    with torch.device("meta"):
        small = nn.Sequential(nn.Linear(64, 64, dtype=torch.float64))
    (skipped,) = conversion_report(convert_to_float8_training(small)).skipped
    assert skipped.skip_reason is not None
    assert "float64" in skipped.skip_reason


@pytest.mark.usefixtures("no_gpu")
def test_on_a_machine_without_gpu_all_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "known_gpu", KNOWN_GPU)
    assert is_float8(convert_to_float8_training(model())) == ["large", "small"]


@pytest.mark.parametrize(
    ("float8_ms", "slower"), [(0.5, None), (1.0, None), (1.1, "0.91x"), (1.25, "0.80x")]
)
def test_auto_filter_measures_each_shape_once(
    float8_ms: float, slower: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(*args: object) -> LinearTimes:
        measured.append(args)
        return LinearTimes(1.0, float8_ms)

    monkeypatch.setattr(filters, "measure_linear", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    gpu, config = torch.device("cuda", 3), Float8LinearConfig()
    twice = nn.ModuleList([model(), model()])
    converted = convert_to_float8_training(twice, auto_filter=True, tokens_per_step=100)
    assert measured == [(100, 8192, 8192, gpu, config), (100, 512, 512, gpu, config)]
    assert len(is_float8(converted)) == (4 if slower is None else 0)
    reasons = {layer.skip_reason for layer in conversion_report(converted).skipped}
    assert reasons == (
        set() if slower is None else {f"measured {slower} of bf16 at 100 tokens on a GPU"}
    )


@pytest.mark.usefixtures("no_gpu")
def test_auto_filter_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="auto_filter: got True without a CUDA GPU"):
        convert_to_float8_training(model(), auto_filter=True)


def test_auto_filter_and_a_filter_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="a given filter decides alone"):
        convert_to_float8_training(model(), auto_filter=True, module_filter_fn=all_linears)


@pytest.mark.parametrize(
    ("tokens", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_tokens_per_step_is_checked(tokens: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="tokens_per_step: got"):
        convert_to_float8_training(model(), tokens_per_step=tokens)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_measured_on_a_gpu() -> None:
    fresh = model("cuda")
    state = torch.cuda.get_rng_state()
    converted = convert_to_float8_training(fresh, auto_filter=True)
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert "large" in is_float8(converted)
    for layer in conversion_report(converted).skipped:
        assert layer.skip_reason is not None
        assert layer.skip_reason.startswith("measured 0.")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_judged_by_size_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "known_gpu", KNOWN_GPU)
    known = KNOWN_GPU(torch.device("cuda", 0))
    converted = convert_to_float8_training(model(device))
    assert is_float8(converted) == (["large", "small"] if known is None else ["large"])


# ---------------------------------------------------------------- by name


class WithHead(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"output": nn.Linear(16, 16), "lora_A": nn.Linear(16, 8)})
        self.add_module(head, nn.Linear(16, 32))


@pytest.mark.parametrize("head", ["lm_head", "output"])
@pytest.mark.parametrize("wrap", [None, "model", "module", "_orig_mod"])
def test_the_head_and_adapters_are_converted_only_if_asked(head: str, wrap: str | None) -> None:
    parts = WithHead(head)
    whole = parts if wrap is None else nn.ModuleDict({wrap: parts})
    convert_to_float8_training(whole)
    assert is_float8(parts) == ["attention.output"]
    reasons = [layer.skip_reason for layer in conversion_report(parts).skipped]
    assert reasons == [
        "of an adapter: converted only if a module_filter_fn takes it",
        "the head: converted only if a module_filter_fn takes it",
    ]
    convert_to_float8_training(whole, module_filter_fn=all_linears)
    assert is_float8(parts) == ["attention.output", "attention.lora_A", head]


def test_nothing_converted_is_told() -> None:
    expected = "no layer of WithHead was converted: module_filter_fn returned False. print"
    with pytest.warns(UserWarning, match=expected) as caught:
        convert_to_float8_training(WithHead("lm_head"), module_filter_fn=lambda mod, fqn: False)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="of ReLU was converted: it has no linear layers"):
        convert_to_float8_training(nn.ReLU())
