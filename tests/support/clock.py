"""A clock that stands still until a test moves it."""

import time
from collections.abc import Callable

import pytest


def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stop `time.perf_counter`; returns what takes the place of `time.sleep`."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    return sleep
