"""The conversion report: every linear layer, what it does or why not."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from float8 import (
    ConversionReport,
    Float8Weights,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from float8.convert.report import LayerReport
from float8.experts.conversion import ExpertsReport
from float8.linear import source
from support.configs import DELAYED, DISABLED, DYNAMIC, mixed, tensorwise


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24))


def of_first(mod: nn.Module, fqn: str) -> bool:
    return fqn == "0"


def test_converted_and_skipped_layers() -> None:
    plain = model()
    reasons = [layer.skip_reason for layer in conversion_report(plain).layers]
    assert reasons == ["not converted, or turned back into high precision"] * 2
    config = mixed(DELAYED, DYNAMIC, DYNAMIC)
    report = conversion_report(
        convert_to_float8_training(plain, config=config, module_filter_fn=of_first)
    )
    scaling = "input delayed/e4m3, weight dynamic/e4m3, grad_output dynamic/e5m2"
    why = "module_filter_fn returned False"
    assert report.converted == (LayerReport("0", 16, 32, scaling, None),)
    assert report.skipped == (LayerReport("2", 32, 24, None, why),)
    assert report.layers == report.converted + report.skipped
    assert str(report).splitlines() == [
        "1 of 2 linear layers run in float8, 40.0% of all matmul weights",
        "  layer  [out, in]        what runs how",
        f"  0      [32, 16]         {scaling}",
        f"  2      [24, 32]         skipped: {why}",
    ]
    report = conversion_report(nn.ReLU())
    assert report == ConversionReport(())
    assert str(report) == "0 of 0 linear layers run in float8, 0.0% of all matmul weights"
    with pytest.raises(TypeError, match=r"model: got dict, expected an nn.Module"):
        conversion_report({})


def test_where_weights_are_in_float8_and_what_is_emulated() -> None:
    plain, of = model().requires_grad_(False), "weight dynamic/e4m3, grad_output dynamic/e5m2"
    for weights, said in (("only", ", weight only in float8"), ("on_the_fly", "")):
        for emulate in (True, False):
            config = tensorwise(emulate=emulate, float8_weights=Float8Weights(weights))
            convert_to_float8_training(plain, config=config, module_filter_fn=of_first)
            (layer,) = conversion_report(plain).converted
            end = f"{of}{said}{', emulate' if emulate else ''}"
            assert layer.scaling == f"input dynamic/e4m3, {end}"
    report = conversion_report(convert_to_high_precision(plain))
    assert {layer.skip_reason for layer in report.layers} == {
        "not converted, or turned back into high precision"
    }


def test_only_all_is_a_hundred_percent() -> None:
    shares = ((0, "100.0%"), (1, ">99.9%"), (400_000, "<0.1%"), (400_001, "0.0%"))
    for left, share in shares:
        skipped = LayerReport("0", left, 1, None, "left")
        converted = LayerReport("1", 400_001 - left, 1, "dynamic", None)
        assert f"in float8, {share} of all" in str(ConversionReport((skipped, converted)))


def test_equal_layers_of_neighbouring_blocks_are_one_line() -> None:
    def block(experts: int) -> nn.Module:
        parts = {"q": nn.Linear(16, 16), "e": nn.ModuleList(model() for _ in range(experts))}
        return nn.ModuleDict(parts)

    blocks = nn.ModuleList([*map(block, (1, 2, 2, 0, 2)), nn.Identity(), block(1)])
    blocks[6].q = nn.Linear(16, 8)
    report = conversion_report(convert_to_float8_training(blocks))
    assert len(report.layers) == 22
    names = [line.split()[0] for line in str(report).splitlines()[3:]]
    of_experts = ["0.e.0.0", "0.e.0.2", "1-2.e.0-1.0", "1-2.e.0-1.2", "4.e.0-1.0", "4.e.0-1.2"]
    assert names == ["0-4.q", *of_experts, "6.q", "6.e.0.0", "6.e.0.2"]


def test_as_plain_data() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(16, 32), "mlp": nn.Linear(16, 16)})
    model.register_module("experts", Experts())
    found = conversion_report(convert_to_float8_training(model))
    plain = found.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["share"] == found.share
    assert plain["chosen_for"] == [*found.chosen_for]
    assert plain["layers"][0] == {
        "fqn": "lm_head",
        "in_features": 16,
        "out_features": 32,
        "scaling": None,
        "skip_reason": "the head: converted only with head=True, or if a module_filter_fn takes it",
    }
    experts = {"fqn": "experts.gate_up_proj", "shape": [4, 32, 16], "module": "Experts"}
    assert plain["others"][0] == experts


def test_a_layer_with_one_gemm_in_float8_is_in_float8() -> None:
    config = mixed(
        DISABLED,
        DISABLED,
        DISABLED,
        cast_config_input_for_grad_weight=DYNAMIC,
        cast_config_grad_output_for_grad_weight=DYNAMIC,
    )
    report = conversion_report(convert_to_float8_training(model(), config=config))
    assert len(report.converted) == 2
    assert "input_for_grad_weight dynamic/e4m3" in report.converted[0].scaling


def test_a_linear_as_root_has_a_name() -> None:
    layer = nn.Linear(16, 16)
    assert conversion_report(layer).layers[0].fqn == "(root)"
    convert_to_float8_training(layer, module_filter_fn=lambda mod, fqn: fqn != "")
    assert type(layer) is nn.Linear
    assert convert_to_float8_training(layer) is layer
    assert [layer.fqn for layer in conversion_report(layer).converted] == ["(root)"]


WRAPS = {
    "deepcopy": copy.deepcopy,
    "compile": lambda m: torch.compile(m, backend="eager"),
    "parent": nn.Sequential,
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_report_holds_after(wrap) -> None:
    converted = convert_to_float8_training(model(), module_filter_fn=of_first)
    wrapped = wrap(converted)
    reports = conversion_report(wrapped), conversion_report(converted)
    after, before = ([(x.scaling, x.skip_reason) for x in each.layers] for each in reports)
    assert after == before
    convert_to_float8_training(wrapped)
    assert conversion_report(wrapped).skipped == ()
    convert_to_high_precision(wrapped)
    reasons = {layer.skip_reason for layer in conversion_report(wrapped).skipped}
    assert reasons == {
        "not converted, or turned back into high precision"
    }  # earlier ones are forgotten


def test_a_layer_on_a_device_without_float8_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "lacks_float8_gemm", lambda *_, **__: "no tensor cores here")
    converted = convert_to_float8_training(model())
    assert conversion_report(converted).skipped[0].skip_reason == (
        "no tensor cores here; set emulate=True to compute in high precision instead"
    )
    convert_to_float8_training(converted, config=tensorwise(emulate=True))
    assert len(conversion_report(converted).converted) == 2


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 16, 16))
        self.bias = nn.Parameter(torch.randn(4, 16))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position_embedding = nn.Parameter(torch.randn(8, 16))
        self.class_token = nn.Parameter(torch.randn(1, 1, 16))
        self.embedding = nn.Embedding(64, 16)
        self.patches = nn.Conv2d(3, 16, 4)
        self.norm = nn.LayerNorm((4, 16))
        self.attention = nn.MultiheadAttention(16, 2)
        self.bilinear = nn.Bilinear(4, 4, 4)
        self.experts = Experts()
        self.linear = nn.Linear(16, 64)
        self.linear.bias.requires_grad_(False)


class First(nn.Module):
    def forward(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return whole

    def right_inverse(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return whole, whole[0, :2].clone()


@pytest.mark.parametrize("prefix", ["", "Parametrized"])
def test_weights_that_no_linear_layer_has_are_listed_and_counted(prefix: str) -> None:
    model = Model()
    weights = {"attention": "in_proj_weight", "bilinear": "weight", "embedding": "weight"}
    for name, weight in weights.items() if prefix else ():
        kind = First() if name == "bilinear" else nn.Identity()
        parametrize.register_parametrization(model.get_submodule(name), weight, kind)
    report = conversion_report(convert_to_float8_training(model))
    assert [(other.fqn, other.shape, other.module) for other in report.others] == [
        ("attention.in_proj_weight", (48, 16), f"{prefix}MultiheadAttention"),
        ("bilinear.weight", (4, 4, 4), f"{prefix}Bilinear"),
        ("experts.gate_up_proj", (4, 32, 16), "Experts"),
        ("experts.down_proj", (4, 16, 16), "Experts"),
    ]
    (skipped,) = report.skipped
    assert skipped.fqn == "attention.out_proj"
    assert "reads the weight of this one itself" in skipped.skip_reason
    everything = 16 * 64 + 16 * 16 + 48 * 16 + 4 * 4 * 4 + 4 * 32 * 16 + 4 * 16 * 16
    assert report.share == pytest.approx(16 * 64 / everything)
    lines = str(report).splitlines()
    assert lines[0] == "1 of 2 linear layers run in float8, 19.8% of all matmul weights"
    unseen = "not seen: of Experts; in float8 if that calls grouped_linear"
    assert lines[-2:] == [
        f"  experts.gate_up_proj      [4, 32, 16]      {unseen}",
        f"  experts.down_proj         [4, 16, 16]      {unseen}",
    ]


def test_each_expert_of_a_weight_counts() -> None:
    layer = LayerReport("layer", 16, 32, None, "left out")
    experts = ExpertsReport("experts.w1", 16, 32, "input dynamic/e4m3", None, experts=3)
    assert ConversionReport((layer,), experts=(experts,)).share == 0.75
