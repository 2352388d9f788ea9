"""Ctrl-C and SIGTERM as a wish to stop after the current step."""

import contextlib
import os
import signal
from collections.abc import Iterator
from threading import Event
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_on_signals(notice: str = "") -> Iterator[Event]:
    """Turn the first SIGINT or SIGTERM into an event that is set; the second one acts as usual.

    Works in the main thread only, as signals do. The notice goes to standard error when the first
    signal comes.
    """
    stop = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        restore.close()
        # Past Python's buffers: the signal may have come in the middle of a write to them.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{notice}\n".encode() if notice else b"")

    with contextlib.ExitStack() as restore:
        for number in NUMBERS:
            restore.callback(signal.signal, number, signal.signal(number, handle))
        yield stop
