"""A layer is checked before it is timed."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import Float8LinearConfig
from float8.convert import measure
from float8.convert.measure import WrongResultError, measure_linear

CPU = torch.device("cpu")
CONFIG = Float8LinearConfig()


def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.nn.Linear):
        @classmethod
        def from_float(cls, mod: torch.nn.Linear, config: object) -> "Wrong":
            wrong = cls(mod.in_features, mod.out_features, bias=False, dtype=mod.weight.dtype)
            wrong.weight = mod.weight
            return wrong

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    monkeypatch.setattr(measure, "Float8Linear", Wrong)
    with pytest.raises(WrongResultError, match="linear 32,64,16: output"):
        measure_linear(32, 64, 16, CPU, CONFIG)


def test_a_layer_is_measured_and_random_numbers_left_alone() -> None:
    state = torch.get_rng_state()
    assert all(ms > 0 for ms in measure_linear(32, 64, 16, CPU, CONFIG))
    assert torch.equal(state, torch.get_rng_state())


def test_no_call_that_is_timed_finds_its_casts_done(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    class CountCasts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[-1] += func.namespace == "float8"
            return func(*args, **(kwargs or {}))

    def milliseconds(call, device) -> float:
        counts.append(0)
        with CountCasts():
            call()
        return 1.0

    monkeypatch.setattr(measure, "milliseconds", milliseconds)
    measure_linear(32, 64, 16, CPU, CONFIG)
    assert set(counts[::2]) == {0}  # bf16
    assert len(set(counts[1::2])) == 1
    assert counts[1] > 0
