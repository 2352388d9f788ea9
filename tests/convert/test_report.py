"""The conversion report: every linear layer, what it does or why not."""

import copy

import pytest
import torch
from torch import nn

from float8 import (
    ConversionReport,
    Float8LinearConfig,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from float8.linear import source
from support.configs import DELAYED, DISABLED, DYNAMIC, mixed, tensorwise


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))


def test_converted_and_skipped_layers() -> None:
    plain = model()
    reasons = [layer.skip_reason for layer in conversion_report(plain).layers]
    assert reasons == ["not seen by convert_to_float8_training"] * 2
    converted = convert_to_float8_training(
        plain,
        config=mixed(DELAYED, DYNAMIC, DYNAMIC),
        module_filter_fn=lambda mod, fqn: fqn == "0",
    )
    report = conversion_report(converted)
    (layer,) = report.converted
    assert (layer.fqn, layer.in_features, layer.out_features) == ("0", 16, 32)
    assert layer.scaling == "input delayed/e4m3, weight dynamic/e4m3, grad_output dynamic/e5m2"
    assert layer.skip_reason is None
    (skipped,) = report.skipped
    assert (skipped.fqn, skipped.in_features, skipped.out_features) == ("2", 32, 10)
    assert skipped.skip_reason == "module_filter_fn returned False"
    assert skipped.scaling is None
    assert report.layers == (layer, skipped)


def test_as_text() -> None:
    converted = convert_to_float8_training(model(), module_filter_fn=lambda mod, fqn: fqn == "0")
    assert str(conversion_report(converted)).splitlines() == [
        "1 of 2 linear layers run in float8, 61.5% of all matmul weights",
        "  0  [32, 16]         input dynamic/e4m3, weight dynamic/e4m3, grad_output dynamic/e5m2",
        "  2  [10, 32]         skipped: module_filter_fn returned False",
    ]


def test_a_layer_whose_casts_are_all_disabled_is_in_high_precision() -> None:
    converted = convert_to_float8_training(model(), config=mixed(DISABLED, DISABLED, DISABLED))
    report = conversion_report(converted)
    assert report.converted == ()
    assert {layer.scaling for layer in report.skipped} == {None}
    assert {layer.skip_reason for layer in report.skipped} == {
        "all casts of its config are DISABLED"
    }


def test_a_layer_with_one_gemm_in_float8_is_in_float8() -> None:
    config = Float8LinearConfig(
        cast_config_input=DISABLED,
        cast_config_weight=DISABLED,
        cast_config_grad_output=DISABLED,
        cast_config_input_for_grad_weight=DYNAMIC,
        cast_config_grad_output_for_grad_weight=DYNAMIC,
    )
    report = conversion_report(convert_to_float8_training(model(), config=config))
    assert len(report.converted) == 2
    assert "input_for_grad_weight dynamic/e4m3" in report.converted[0].scaling


@pytest.mark.parametrize("wrong", [None, {}, "model", torch.ones(1)])
def test_anything_but_a_module_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"model: got \w+, expected an nn.Module"):
        conversion_report(wrong)


def test_an_empty_model() -> None:
    report = conversion_report(nn.ReLU())
    assert report == ConversionReport(())
    assert str(report) == "0 of 0 linear layers run in float8, 0.0% of all matmul weights"


def test_a_linear_as_root_has_a_name() -> None:
    layer = nn.Linear(16, 16)
    assert conversion_report(layer).layers[0].fqn == "(root)"
    convert_to_float8_training(layer)
    assert [layer.fqn for layer in conversion_report(layer).converted] == ["(root)"]


@pytest.mark.parametrize("wrap", ["deepcopy", "compile", "parent"])
def test_the_report_holds_after(wrap: str) -> None:
    converted = convert_to_float8_training(model(), module_filter_fn=lambda mod, fqn: fqn == "0")
    wrapped = {
        "deepcopy": copy.deepcopy,
        "compile": lambda m: torch.compile(m, backend="eager"),
        "parent": nn.Sequential,
    }[wrap](converted)
    reports = conversion_report(wrapped), conversion_report(converted)
    after, before = ([(x.scaling, x.skip_reason) for x in each.layers] for each in reports)
    assert after == before
    convert_to_float8_training(wrapped)
    assert conversion_report(wrapped).skipped == ()
    convert_to_high_precision(wrapped)
    reasons = {layer.skip_reason for layer in conversion_report(wrapped).skipped}
    assert reasons == {"not seen by convert_to_float8_training"}  # earlier ones are forgotten


def test_a_layer_on_a_device_without_float8_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "lacks_float8_gemm", lambda *_: "no tensor cores here")
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
        self.experts = Experts()
        self.linear = nn.Linear(16, 64)
        self.linear.bias.requires_grad_(False)


def test_weights_that_no_linear_layer_has_are_listed_and_counted() -> None:
    report = conversion_report(convert_to_float8_training(Model()))
    assert [(other.fqn, other.shape, other.module) for other in report.others] == [
        ("attention.in_proj_weight", (48, 16), "MultiheadAttention"),
        ("experts.gate_up_proj", (4, 32, 16), "Experts"),
        ("experts.down_proj", (4, 16, 16), "Experts"),
    ]
    everything = 16 * 64 + 16 * 16 + 48 * 16 + 4 * 32 * 16 + 4 * 16 * 16
    assert report.share == pytest.approx(16 * 64 / everything)
    lines = str(report).splitlines()
    assert lines[0] == "1 of 2 linear layers run in float8, 20.0% of all matmul weights"
    assert lines[-2:] == [
        "  experts.gate_up_proj      [4, 32, 16]      "
        "not converted: a weight of Experts, no linear layer",
        "  experts.down_proj         [4, 16, 16]      "
        "not converted: a weight of Experts, no linear layer",
    ]


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe"])
def test_experts_of_transformers_are_listed(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
    )
    moe = getattr(transformers, f"{name}ForCausalLM")(config)
    report = conversion_report(convert_to_float8_training(moe))
    prefix = "model.layers.0.mlp"
    others = {other.fqn: other.shape for other in report.others}
    assert others[f"{prefix}.experts.gate_up_proj"] == (4, 128, 32)
    assert others[f"{prefix}.experts.down_proj"] == (4, 32, 64)
    assert not any("embed" in name or "norm" in name for name in others)
    matrices = sum(p.numel() for p in moe.parameters() if p.dim() > 1)
    embedding = moe.model.embed_tokens.weight.numel()
    converted = sum(x.in_features * x.out_features for x in report.converted)
    assert report.share == pytest.approx(converted / (matrices - embedding))
    assert report.share < 0.6
