"""Which layers are converted without a filter: those that float8 makes no slower."""

import copy
import dataclasses
from functools import partial
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
    all_linears,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from float8.convert import choice
from float8.convert.speed import MEMORY, judged_as
from support.configs import DISABLED, mixed
from support.errors import require_errors

# Not what tests/conftest.py replaces.
GPU_FOR = choice.gpu_for


def model(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return nn.ModuleDict({"large": nn.Linear(8192, 8192), "small": nn.Linear(512, 512)})


def is_float8(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, Float8Linear)]


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "gpu_for", lambda device: "H100")


def test_each_recipe_has_a_time_of_its_own() -> None:
    """The feed-forward of a 150m model: 1.02 of a step, `rowwise` of all layers 0.88."""
    layers = nn.Sequential(nn.Linear(1024, 3072, device="meta"))
    how: dict[str, Any] = {"gpu": "H200", "cuda_graphs": True}
    assert is_float8(convert_to_float8_training(copy.deepcopy(layers), **how)) == ["0"]
    with pytest.warns(UserWarning, match="loses: modelled 0.9.x of bf16 on H200, 8192 tokens"):
        convert_to_float8_training(layers, config="rowwise", **how)


@pytest.mark.parametrize("recipe", [recipe.value for recipe in Float8LinearRecipeName])
def test_a_config_is_judged_as_the_recipe_that_it_is_like(recipe: str) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)
    more = {"float8_weights": Float8Weights.HELD} if recipe != "rowwise_with_gw_hp" else {}
    assert judged_as(dataclasses.replace(config, emulate=True, **more)) == recipe
    if recipe == "delayed":  # the weight is the smallest part
        assert judged_as(dataclasses.replace(config, cast_config_weight=CastConfig())) == recipe


@pytest.mark.usefixtures("on_h100")
def test_what_else_decides() -> None:
    everything = ["large", "small"]
    for arguments, expected in (
        ({"tokens_per_step": 16}, []),
        ({"module_filter_fn": all_linears}, everything),  # decides alone
        ({"config": Float8LinearConfig(emulate=True)}, everything),  # not about speed
    ):
        assert is_float8(convert_to_float8_training(model(), **arguments)) == expected
    off = mixed(DISABLED, DISABLED, DISABLED)  # no question of speed either
    (_, small) = conversion_report(convert_to_float8_training(model(), config=off)).layers
    assert small.skip_reason == "all casts of its config are DISABLED"


def test_gpus_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, known in (
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "H200"),
        ("NVIDIA H20", "NVIDIA H20"),
        ("NVIDIA L40S", "NVIDIA L40S"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        for device in ("cuda:0", "cpu", "meta"):
            assert GPU_FOR(torch.device(device)) == known


@pytest.mark.usefixtures("on_h100")
def test_a_layer_that_cannot_be_converted_says_so_and_not_how_slow_it_is() -> None:
    with torch.device("meta"):
        small = nn.Sequential(nn.Linear(64, 64, dtype=torch.float64))
    (skipped,) = conversion_report(convert_to_float8_training(small)).skipped
    assert skipped.skip_reason is not None
    assert "float64" in skipped.skip_reason


def test_on_a_machine_without_gpu_all_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(choice, "gpu_for", GPU_FOR)
    assert is_float8(convert_to_float8_training(model())) == ["large", "small"]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_judged_by_size_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "gpu_for", GPU_FOR)
    known = GPU_FOR(torch.device("cuda", 0))
    converted = convert_to_float8_training(model(device))
    small_too = known not in MEMORY
    assert is_float8(converted) == (["large", "small"] if small_too else ["large"])


# ---------------------------------------------------------------- for a GPU that is not here


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("emulate", [False, True])
def test_the_gpu_that_is_named_decides_wherever_weights_are(device: str, emulate: bool) -> None:
    with torch.device(device):
        layers = nn.ModuleDict({"large": nn.Linear(2048, 2048), "small": nn.Linear(512, 512)})
    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(layers, gpu="h100", config=config)
    assert is_float8(layers) == ["large"]
    report = conversion_report(layers)
    assert report.skipped[0].skip_reason == (
        "loses: modelled 0.47x of bf16 on H100, 8192 tokens per forward"
    )
    expected = 'chosen for H100 (gpu="H100"): modelled as tensorwise at 8192 tokens per forward'
    assert report.chosen_for == (expected,)
    assert expected in str(report).splitlines()


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_a_layer_that_waits_for_the_cpu_stays_but_in_a_cuda_graph(gpu: str) -> None:
    with torch.device("meta"):
        layers = nn.ModuleDict({"wide": nn.Linear(2048, 2048), "waits": nn.Linear(1024, 3072)})
    convert_to_float8_training(layers, gpu=gpu)
    assert is_float8(layers) == ["wide"]
    of_cpu = (
        "waits for the CPU: 0.22 ms of H200 in bf16 is less than the CPU needs; "
        "cuda_graphs=True converts it"
    )
    of_gpu = "loses: modelled 0.94x of bf16 on H100, 8192 tokens per forward"
    (waits,) = conversion_report(layers).skipped
    assert waits.skip_reason == {"H100": of_gpu, "H200": of_cpu}[gpu]
    convert_to_float8_training(layers, gpu=gpu, cuda_graphs=True)
    assert is_float8(layers) == ["wide", *["waits"] * (gpu == "H200")]
    (chosen,) = conversion_report(layers).chosen_for
    assert chosen.endswith("modelled as tensorwise at 8192 tokens per forward, as CUDA graphs")


def test_frozen_layers_are_judged_by_what_they_run() -> None:
    """Two GEMMs, and casts of tokens that nobody needs transposed."""
    layer = nn.Linear(2048, 2048, device="meta")
    for trains in (True, False):
        whole = nn.Sequential(copy.deepcopy(layer).requires_grad_(trains))
        convert_to_float8_training(whole, gpu="H100", cuda_graphs=True, tokens_per_step=4096)
        assert is_float8(whole) == ([] if trains else ["0"])


def test_what_arguments_cannot_be() -> None:
    layers, filtered = model(), {"module_filter_fn": all_linears}
    gpus = "expected one that is modelled, of 'H100', 'H200'; leave it out"
    for expected, arguments in (
        ("ValueError: tokens_per_step: got", {"tokens_per_step": 0}),
        ("TypeError: tokens_per_step: got", {"tokens_per_step": 1.5}),
        ("TypeError: tokens_per_step: got", {"tokens_per_step": True}),
        ("TypeError: cuda_graphs: got 'auto', expected True or", {"cuda_graphs": "auto"}),
        (
            "ValueError: alone, with gpu=None and cuda_graphs=T",
            {"cuda_graphs": True, **filtered},
        ),
        (f"ValueError: gpu: got 'B200', {gpus}", {"gpu": "B200"}),
        ("ValueError: gpu: got .'H100'., expected one", {"gpu": ["H100"]}),
        ("ValueError: alone, with gpu=.H100. and cuda_graphs=F", {"gpu": "H100", **filtered}),
    ):
        require_errors((expected, partial(convert_to_float8_training, **arguments), [layers]))
    assert is_float8(layers) == []


def test_on_a_gpu_that_is_not_modelled_narrow_layers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "gpu_for", lambda device: "NVIDIA L40S")
    with torch.device("meta"):
        layers = nn.ModuleDict({"wide": nn.Linear(256, 256), "narrow": nn.Linear(1024, 255)})
    convert_to_float8_training(layers)
    assert is_float8(layers) == ["wide"]
    report = conversion_report(layers)
    (narrow,) = report.skipped
    assert narrow.skip_reason == ("255 features are less than 256, and NVIDIA L40S is not modelled")
    assert report.chosen_for[0].startswith("NVIDIA L40S is not modelled: layers narrower than")


def test_a_gpu_may_have_the_name_that_torch_gives_it() -> None:
    report = conversion_report(convert_to_float8_training(model(), gpu="NVIDIA H100 80GB HBM3"))
    assert report.chosen_for[0].startswith('chosen for H100 (gpu="H100")')


def test_reasons_of_an_earlier_conversion_stay_where_a_filter_takes_nothing() -> None:
    parts = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "r": nn.Linear(32, 8)})
    whole = nn.Sequential(nn.ModuleDict({"body": parts, "lm_head": nn.Linear(32, 32)}))

    def reasons() -> dict[str, str | None]:
        layers = conversion_report(whole).layers
        return {layer.fqn.rpartition(".")[2]: layer.skip_reason for layer in layers}

    convert_to_float8_training(whole, module_filter_fn=lambda mod, fqn: fqn.endswith("a"))
    assert reasons()["lm_head"] == reasons()["b"] == "module_filter_fn returned False"
    convert_to_float8_training(whole)
    first = reasons()
    assert str(first["lm_head"]).startswith("the head: converted only if")
    router = "N=8 is less than 16, as a router's: converted only if a module_filter_fn takes it"
    assert first["r"] == router
    convert_to_float8_training(
        whole, config="rowwise", module_filter_fn=lambda mod, fqn: fqn.endswith("b")
    )
    assert reasons() == first
    convert_to_float8_training(whole, module_filter_fn=all_linears)
    assert {*reasons().values()} == {None}


def test_the_report_speaks_of_the_last_conversion_only() -> None:
    whole = nn.Sequential(nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 8))
    convert_to_float8_training(whole[0])
    assert conversion_report(whole).chosen_for[0].startswith("no GPU here: layers of any size")
    convert_to_float8_training(whole, module_filter_fn=all_linears)
    assert conversion_report(whole).chosen_for == ()
    convert_to_float8_training(convert_to_high_precision(whole))
    assert len(conversion_report(whole).chosen_for) == 1
    assert conversion_report(convert_to_high_precision(whole)).chosen_for == ()


# ---------------------------------------------------------------- by name


class WithHead(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"output": nn.Linear(16, 16), "lora_A": nn.Linear(16, 8)})
        self.add_module(head, nn.Linear(16, 32))


@pytest.mark.parametrize("head", ["lm_head", "output"])
def test_the_head_and_adapters_are_converted_only_if_asked(head: str) -> None:
    for wrap in (None, "model", "module", "_orig_mod"):
        parts = WithHead(head)
        whole = parts if wrap is None else nn.ModuleDict({wrap: parts})
        convert_to_float8_training(whole)
        assert is_float8(parts) == ["attention.output"]
        assert [layer.skip_reason for layer in conversion_report(parts).skipped] == [
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
    forgotten: Any = lambda mod, fqn: print(end="")  # noqa: E731, T201
    with pytest.warns(UserWarning, match="converted: module_filter_fn returned None"):
        convert_to_float8_training(WithHead("lm_head"), module_filter_fn=forgotten)
    with pytest.warns(UserWarning, match="of ReLU was converted: it has no nn.Linear"):
        convert_to_float8_training(nn.ReLU())
