"""Times that only benchmarks take: of a steady state, and of issuing calls."""

from __future__ import annotations

import statistics
import time

import torch

from float8.measure import Call, Sampler, call_sampler

_WARMUP = 3


def steady_sampler(call: Call, device: torch.device, *, at_least_ms: float = 5.0) -> Sampler:
    """Samples a call in a steady state: as many calls back to back as take `at_least_ms`.

    A single call would be charged the wait for its first kernel, which a training step hides
    behind the work before it. The number of calls is chosen from a few calls made now.
    """
    for _ in range(3):
        call()
    once = min(call_sampler([call], device)() for _ in range(3))
    count = max(1, min(20, round(at_least_ms / max(once, 1e-3))))
    return call_sampler([call] * count, device)


def issue_microseconds(
    call: Call, device: torch.device, *, calls: int = 20, samples: int = 15
) -> float:
    """Median time that the calling thread takes to issue `call`, in microseconds.

    The GPU's time must be the shorter one: give it a tensor too small to matter.

    Args:
        call: What is issued.
        device: Where it runs.
        calls: How often it is issued in one sample.
        samples: How many samples are taken.
    """
    times = []
    for sample in range(samples + _WARMUP):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if sample >= _WARMUP:
            times.append((time.perf_counter() - start) * 1e6 / calls)
    return statistics.median(times)
