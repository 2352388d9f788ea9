"""Times that only benchmarks take."""

import time

import torch

from float8.bench.timing import issue_microseconds, steady_sampler

CPU = torch.device("cpu")


def test_short_calls_are_repeated_and_long_ones_are_not() -> None:
    calls = 0

    def short() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.001)

    sample = steady_sampler(short, CPU, at_least_ms=5)
    calls = 0
    sample()
    assert 3 <= calls <= 5
    sample = steady_sampler(short, CPU, at_least_ms=0.1)
    calls = 0
    sample()
    assert calls == 1


def test_issue_time_is_in_microseconds() -> None:
    assert 1000 <= issue_microseconds(lambda: time.sleep(0.001), CPU, samples=2) < 3000
