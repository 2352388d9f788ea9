"""How close results are to their references; a wrong one ends a measurement."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from float8.convert.measure import WrongResultError

_CHUNK = 1 << 26  # elements taken to float64 at a time: a large result may fill half the memory


def check(
    what: str, reference: Mapping[str, Tensor], results: Mapping[str, Tensor], at_least: float
) -> float:
    """The lowest signal to quantisation noise ratio of all results in dB; infinite if all equal.

    References have at least one dim, on any device; results have the same names and shapes. Where
    there is a process group, tensors are shards and ratios those of whole ones: all ranks must
    call it, and all come to the same end. A `WrongResultError` if a result is below `at_least`, or
    not a number.
    """
    powers = []
    for name, expected in reference.items():
        if expected.shape != results[name].shape:
            raise WrongResultError(
                f"{what} {name}: shape {tuple(results[name].shape)}, expected "
                f"{tuple(expected.shape)}; nothing was timed"
            )
        powers.append(_powers(expected.detach(), results[name].detach()))
    total = torch.stack(powers)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    signal, noise = total.unbind(1)
    found = (10 * torch.log10(signal / noise)).tolist()
    for name, quality in zip(reference, found, strict=True):
        if not quality >= at_least:  # also if it is NaN
            raise WrongResultError(
                f"{what} {name}: SQNR {quality:.1f} dB, expected at least {at_least:.0f} dB; "
                "nothing was timed"
            )
    return float(min(found))


def _powers(reference: Tensor, x: Tensor) -> Tensor:
    """[2] float64: the power of the reference and that of the error."""
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    parts = 1 + x.numel() // _CHUNK
    for a, b in zip(reference.chunk(parts), x.chunk(parts), strict=True):
        a, b = a.to(x.device).double(), b.double()
        total += torch.stack([a.square().sum(), (a - b).square().sum()])
    return total
