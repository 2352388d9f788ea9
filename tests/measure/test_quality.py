"""A wrong result ends a measurement."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from float8.measure import WrongResultError, check, measure_linear, quality, sqnr
from float8.measure import layer as measured_layer

X = torch.randn(64, 64)


def test_sqnr(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sqnr(X, X) == math.inf
    assert sqnr(X, X * 1.1) == pytest.approx(20.0)
    monkeypatch.setattr(quality, "_CHUNK", 640)  # in several parts
    assert sqnr(X, X * 1.1) == pytest.approx(20.0)
    assert not sqnr(X, X / 0) > -math.inf
    assert math.isnan(sqnr(X / 0, X / 0))


def test_good_results_pass() -> None:
    assert check("it", X, X * 1.1, 19.9) == pytest.approx(20.0)


@pytest.mark.parametrize("wrong", [X * 1.1, -X, X / 0, torch.zeros_like(X)])
def test_wrong_results_say_which(wrong: torch.Tensor) -> None:
    with pytest.raises(WrongResultError, match=r"the thing: SQNR .* at least 21 dB; nothing was"):
        check("the thing", X, wrong, 21.0)


def test_another_shape_is_wrong() -> None:
    with pytest.raises(WrongResultError, match=r"shape \(1, 64\), expected \(64, 64\)"):
        check("it", X, X[:1], 0.0)


def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.nn.Linear):
        @classmethod
        def from_float(cls, mod: torch.nn.Linear, config: object) -> "Wrong":
            wrong = cls(mod.in_features, mod.out_features, bias=False, dtype=mod.weight.dtype)
            wrong.weight = mod.weight
            return wrong

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    monkeypatch.setattr(measured_layer, "Float8Linear", Wrong)
    with pytest.raises(WrongResultError, match="linear 32,64,16: output"):
        measure_linear(32, 64, 16, torch.device("cpu"))


def test_a_layer_is_measured() -> None:
    assert all(ms > 0 for ms in measure_linear(32, 64, 16, torch.device("cpu")))


def test_no_call_that_is_timed_finds_its_casts_done(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    class CountCasts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[-1] += func.namespace == "float8"
            return func(*args, **(kwargs or {}))

    def sampler(calls, device):
        def sample() -> float:
            counts.append(0)
            with CountCasts():
                calls[0]()
            return 1.0

        return sample

    monkeypatch.setattr(measured_layer, "kernel_sampler", sampler)
    measure_linear(32, 64, 16, torch.device("cpu"))
    assert set(counts[::2]) == {0}  # bf16
    assert len(set(counts[1::2])) == 1
    assert counts[1] > 0
