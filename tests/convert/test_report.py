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
)
from float8.linear import source
from support.configs import DELAYED, DISABLED, DYNAMIC, mixed, tensorwise


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))


def test_nothing_was_converted_yet() -> None:
    report = conversion_report(model())
    assert report.converted == ()
    assert [layer.fqn for layer in report.skipped] == ["0", "2"]
    assert report.skipped[0].skip_reason == "not seen by convert_to_float8_training"


def test_converted_and_skipped_layers() -> None:
    converted = convert_to_float8_training(
        model(),
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
        "1 of 2 linear layers run in float8",
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
    assert str(report) == "0 of 0 linear layers run in float8"


def test_a_linear_as_root_has_a_name() -> None:
    assert conversion_report(nn.Linear(16, 16)).layers[0].fqn == "(root)"
    layer = convert_to_float8_training(nn.Linear(16, 16))
    assert [layer.fqn for layer in conversion_report(layer).converted] == ["(root)"]


def test_a_later_conversion_forgets_the_earlier_reason() -> None:
    converted = convert_to_float8_training(model(), module_filter_fn=lambda mod, fqn: fqn == "0")
    convert_to_float8_training(converted)
    assert conversion_report(converted).skipped == ()


@pytest.mark.parametrize("wrap", ["deepcopy", "compile", "parent"])
def test_the_report_holds_after(wrap: str) -> None:
    converted = convert_to_float8_training(model(), module_filter_fn=lambda mod, fqn: fqn == "0")
    wrapped = {
        "deepcopy": copy.deepcopy,
        "compile": lambda m: torch.compile(m, backend="eager"),
        "parent": nn.Sequential,
    }[wrap](converted)
    report, before = conversion_report(wrapped), conversion_report(converted)
    assert [layer.scaling for layer in report.layers] == [layer.scaling for layer in before.layers]
    assert [layer.skip_reason for layer in report.layers] == [
        layer.skip_reason for layer in before.layers
    ]


def test_a_shared_layer_counts_once() -> None:
    linear = nn.Linear(16, 16)
    converted = convert_to_float8_training(nn.Sequential(linear, linear))
    assert len(conversion_report(converted).layers) == 1


def test_a_layer_on_a_device_without_float8_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "lacks_float8_gemm", lambda *_: "no tensor cores here")
    converted = convert_to_float8_training(model())
    assert conversion_report(converted).skipped[0].skip_reason == (
        "no tensor cores here; set emulate=True to compute in high precision instead"
    )
    convert_to_float8_training(converted, config=tensorwise(emulate=True))
    assert len(conversion_report(converted).converted) == 2
