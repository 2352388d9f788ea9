"""A wrong result ends a measurement."""

import math

import pytest
import torch

from float8.convert.measure import WrongResultError
from float8_lab.bench import step
from float8_lab.bench.step import check

X = torch.randn(64, 64)
AS_IT_IS = {"one": X, "two": X}


def test_the_lowest_ratio_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("it", AS_IT_IS, AS_IT_IS, 1e9) == math.inf
    off = {"two": X * 1.1, "one": X * 1.01, "unasked": X / 0}
    assert check("it", AS_IT_IS, off, 19.9) == pytest.approx(20.0)
    monkeypatch.setattr(step, "_CHUNK", 640)  # in several parts
    assert check("it", AS_IT_IS, off, 19.9) == pytest.approx(20.0)


@pytest.mark.parametrize("wrong", [X * 1.1, -X, X / 0, torch.zeros_like(X)])
def test_wrong_results_say_which(wrong: torch.Tensor) -> None:
    with pytest.raises(WrongResultError, match=r"the thing two: SQNR .* at least 21 dB; nothing"):
        check("the thing", AS_IT_IS, {"one": X, "two": wrong}, 21.0)


def test_a_reference_that_is_no_number_is_wrong() -> None:
    with pytest.raises(WrongResultError, match="it x: SQNR nan dB"):
        check("it", {"x": X / 0}, {"x": X / 0}, 0.0)


def test_another_shape_is_wrong() -> None:
    with pytest.raises(WrongResultError, match=r"it x: shape \(1, 64\), expected \(64, 64\)"):
        check("it", {"x": X}, {"x": X[:1]}, 0.0)
