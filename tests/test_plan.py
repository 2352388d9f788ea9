"""Plans of what to convert."""

import pytest
import torch
from torch import nn

from float8 import Float8LinearConfig
from float8.cost import KNOWN
from float8.plan import Verdict, estimator, measurer, plan_conversion


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "a": nn.Linear(4096, 4096),
                "b": nn.Linear(4096, 4096),
                "small": nn.Linear(64, 64),
                "head": nn.Linear(4096, 4096),
            }
        )


def judge(in_features: int, out_features: int) -> Verdict:
    return Verdict(2.0, 1.0 if in_features > 64 else 4.0, "measured", 128, "nothing")


def test_layers_are_grouped_by_shape_and_fate() -> None:
    plan = plan_conversion(model(), judge=judge, module_filter_fn=lambda mod, fqn: fqn != "head")
    found = [(layer.names, layer.in_features, layer.convert) for layer in plan.layers]
    assert found == [(("a", "b"), 4096, True), (("small",), 64, False), (("head",), 4096, False)]
    assert plan.bf16_ms == 8.0
    assert plan.planned_ms == 2 * 1.0 + 2.0 + 2.0
    assert plan.step_speedup(2.0) == 10.0 / 8.0


def test_the_model_is_not_changed() -> None:
    planned = model()
    plan_conversion(planned, judge=judge)
    assert all(type(layer) is nn.Linear for layer in planned.children())


def test_estimates_say_what_they_are_for() -> None:
    verdict = estimator(8192, Float8LinearConfig(), KNOWN["h100"], "NVIDIA H100")(512, 512)
    assert not verdict.worthwhile
    assert str(verdict) == f"estimated {verdict.speedup:.2f}x of bf16 at 8192 tokens on NVIDIA H100"


def test_measuring_runs_once_per_shape_and_leaves_random_numbers_alone() -> None:
    measured = measurer(32, Float8LinearConfig(), torch.device("cpu"))
    state = torch.get_rng_state()
    verdict = measured(64, 32)
    assert torch.equal(state, torch.get_rng_state())
    assert verdict.bf16_ms > 0
    assert verdict.float8_ms > 0
    assert measured(64, 32) is verdict


def test_without_a_gpu_there_must_be_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        plan_conversion(model())


@pytest.mark.gpu
def test_a_large_layer_gains_on_a_gpu() -> None:
    verdict = measurer(8192, Float8LinearConfig(), torch.device("cuda", 0))(4096, 4096)
    assert verdict.speedup > 1
