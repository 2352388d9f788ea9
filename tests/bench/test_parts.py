"""Times are fair; single layers and experts on tiny shapes; wrong results end a benchmark."""

from functools import partial

import pytest
import torch
from torch import nn

from float8_lab.bench import experts, linear
from float8_lab.bench.experts import Experts, bench_experts, parse_experts
from float8_lab.bench.linear import LinearStep, measure_linear
from float8_lab.bench.step import WARMUP, Step, bench_steps
from float8_lab.bench.variants import Variant
from float8_lab.errors import FailedError
from support.clock import stopped_clock
from support.devices import on_devices

CPU = torch.device("cpu")
SHAPE = 32, 64, 48


def test_a_step_is_timed_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = stopped_clock(monkeypatch)
    bf16, *_ = linear.make_variants([], ["eager"])
    step = Step(bf16, nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), torch.ones(1, 2))
    durations = iter([5.0] * WARMUP + [0.001, 0.003])  # the first ones do not count
    monkeypatch.setattr(Step, "__call__", lambda self: sleep(next(durations)))
    assert step.times(2) == pytest.approx([1.0, 3.0])


@on_devices
def test_linear(device: str) -> None:
    for shape in (SHAPE, (64, 32, 32)):
        found = measure_linear(shape, "delayed", torch.device(device))
        assert min(found) > 0


def doubled(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, arguments, output: 2 * output)
    return model


def test_a_wrong_layer_is_not_timed() -> None:
    bf16, ours = linear.make_variants(["tensorwise"], ["eager"])
    message = "wrong, eager: output: SQNR .* nothing was timed"
    wrong = Variant("wrong", "eager", doubled, config=ours.config)
    make = partial(LinearStep, SHAPE, CPU)
    with pytest.raises(FailedError, match=message):
        list(bench_steps(make, [bf16, wrong], CPU, 1))
    peer = Variant("peer", "eager", doubled)  # of others only the reason is told
    *_, (reference, left_out) = bench_steps(make, [bf16, peer], CPU, 1)
    assert "FailedError: peer, eager: output" in left_out["left_out"]
    assert "ms" in reference
    assert "ms" not in left_out


@pytest.mark.gpu
def test_a_large_layer_gains_on_a_gpu() -> None:
    high, low = measure_linear((8192, 4096, 4096), "tensorwise", torch.device("cuda", 0))
    assert low < high


@on_devices
def test_layers_of_experts(device: str) -> None:
    shape = Experts(4, 1999, 32, 48)  # groups of 499 and 500 rows
    (layers,) = bench_experts([shape], experts.RECIPES, torch.device(device), 1, 2)
    assert [row["recipe"] for row in layers] == ["bf16", *experts.RECIPES]
    for row in layers[1:]:
        assert row["sqnr_db"] > 20
        assert row["speedup"] == pytest.approx(layers[0]["ms"] / row["ms"])


def test_wrong_experts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts.apply_grouped
    monkeypatch.setattr(experts, "apply_grouped", lambda *rest: 1.3 * right(*rest))
    with pytest.raises(FailedError, match=r"rowwise, .*; nothing was timed"):
        next(bench_experts([Experts(4, 500, 32, 48)], ["rowwise"], CPU, 1))


def test_experts_by_name_and_by_size() -> None:
    for name, each in experts.EXPERTS.items():
        assert parse_experts(name) == each
        assert str(each) == name
    assert parse_experts("4, 500,32,48") == (4, 500, 32, 48)
    for text in ("mixtral", "4,100,32", "4,100,32,40"):
        with pytest.raises(ValueError, match=r"got '.*', expected "):
            parse_experts(text)
