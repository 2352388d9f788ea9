from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from float8_lab.trainer.interrupt import stop_on_signals


@pytest.fixture(autouse=True)
def usual_ctrl_c() -> Iterator[None]:
    """Python's own handler: a process started in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_handlers_come_back(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signals("stopping soon") as stop:
        assert not stop.is_set()
        assert signal.getsignal(number) not in before
        os.kill(os.getpid(), number)
        assert stop.is_set()
        assert capfd.readouterr().err == "\nstopping soon\n"
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_second_ctrl_c_acts_as_usual() -> None:
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
