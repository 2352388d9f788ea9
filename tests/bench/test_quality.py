"""A wrong result ends a measurement."""

import math

import pytest
import torch

from float8.convert.measure import WrongResultError
from float8_lab.bench import quality
from float8_lab.bench.quality import check, sqnr

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
