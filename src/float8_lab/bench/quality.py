"""How close a result is to its reference; a wrong one ends a measurement."""

from __future__ import annotations

import torch
from torch import Tensor

from float8.convert.measure import WrongResultError

_CHUNK = 1 << 26  # elements taken to float64 at a time: a large result may fill half the memory


def sqnr(reference: Tensor, x: Tensor) -> float:
    """Signal to quantisation noise ratio in dB, of tensors with at least one dim.

    Infinite if the two are equal, -inf or NaN if either is not finite.
    """
    signal = noise = torch.zeros((), dtype=torch.float64, device=reference.device)
    parts = 1 + reference.numel() // _CHUNK
    for a, b in zip(reference.detach().chunk(parts), x.detach().chunk(parts), strict=True):
        a, b = a.double(), b.double()
        signal, noise = signal + a.square().sum(), noise + (a - b).square().sum()
    return (10 * torch.log10(signal / noise)).item()


def check(what: str, reference: Tensor, x: Tensor, at_least: float) -> float:
    """The SQNR of `x` in dB.

    Raises:
        WrongResultError: It is below `at_least`, or not a number, or the shapes differ.
    """
    if reference.shape != x.shape:
        raise WrongResultError(
            f"{what}: shape {tuple(x.shape)}, expected {tuple(reference.shape)}; nothing was timed"
        )
    quality = sqnr(reference, x)
    if not quality >= at_least:  # also if it is NaN
        raise WrongResultError(
            f"{what}: SQNR {quality:.1f} dB, expected at least {at_least:.0f} dB; nothing was timed"
        )
    return quality
