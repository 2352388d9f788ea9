"""Signal-to-quantisation-noise ratio, the measure of every comparison that is not bitwise."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def sqnr(expected: Tensor, actual: Tensor) -> float:
    """`10 log10(signal power / noise power)` in dB; Inf where the two are equal.

    NaN (and so no bound met) where `actual` is not finite, or `expected` is all zeros.
    """
    assert expected.shape == actual.shape, (expected.shape, actual.shape)
    signal = expected.detach().to(torch.float64)
    noise = signal - actual.detach().to(signal)
    signal_power, noise_power = signal.square().sum().item(), noise.square().sum().item()
    if signal_power == 0 or not math.isfinite(noise_power):
        return math.nan
    return math.inf if noise_power == 0 else 10 * math.log10(signal_power / noise_power)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit; NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (t.detach().contiguous().cpu().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def assert_close(
    wanted: Mapping[str, Tensor],
    got: Mapping[str, Tensor],
    bound: float = math.inf,
    what: object = "",
) -> None:
    """Compare names, dtypes, and values: bit by bit, or, but for zeros, above `bound` dB."""
    assert wanted.keys() == got.keys(), what
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, (what, name)
        if bound == math.inf or not value.any():
            assert same_bits(got[name], value), (what, name)
        else:
            assert sqnr(value, got[name]) > bound, (what, name)


def assert_same_bits(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: object = ""
) -> None:
    """The same names, at least one, and the same bits of each."""
    assert got, what
    assert_close(wanted, got, what=what)
