"""Ctrl-C and SIGTERM as a wish to stop after the current step."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Whether someone asked the run to end.

    Attributes:
        requested: Set once, by a signal or by the program itself.
    """

    requested: bool = False


@contextlib.contextmanager
def stop_on_signals(notice: str = "") -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; the second one acts as usual.

    Works in the main thread only, as signals do.

    Args:
        notice: Written to standard error when the first signal comes.
    """
    request = StopRequest()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        request.requested = True
        restore()
        if notice:
            # Past Python's buffers: the signal may have come in the middle of a write to them.
            with contextlib.suppress(OSError, ValueError):
                os.write(2, f"\n{notice}\n".encode())

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()
