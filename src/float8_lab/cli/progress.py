"""A run on the terminal: what it shows, and signals that ask it to stop."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from threading import Event
from types import FrameType

from rich.console import Console

from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.metrics import StepRecord, ValidationRecord

_NOTICE = b"\nstopping after this step, with a checkpoint (again: stop at once)\n"


def make_console() -> Console:
    """The console on standard output."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:  # a log has no width; this one holds the widest table
        console.width = max(console.width, 120)
    return console


class ConsoleProgress:
    """Shows loss, speed, step time and memory in lines.

    Without a console lines go to standard output and begin with the name of the run's folder: for
    several runs at once, to whose processes such a one can be pickled.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console, self._steps, self._name = console, 0, ""

    def _print(self, text: str) -> None:
        (self._console or make_console()).print(self._name + text)

    def on_start(self, config: TrainConfig, step: int, about: str) -> None:
        """Say what is trained on what."""
        self._steps = config.steps
        self._name = f"{Path(config.output).name}: " * (self._console is None)
        self._print(about + f"\n  resumed after step {step}" * bool(step))

    def on_records(self, records: Sequence[StepRecord]) -> None:
        """Print the mean of these steps."""
        last = records[-1]
        loss, seconds = (fmean(getattr(x, name) for x in records) for name in ("loss", "seconds"))
        text = f"loss {loss:.4f}  {last.tokens / seconds:,.0f} tok/s  {1e3 * seconds:.0f} ms"
        if last.memory_bytes is not None:
            text += f"  {last.memory_bytes / 2**30:.2f} GiB"
        self._print(f"  step {last.step}/{self._steps}  {text}")

    def on_validation(self, record: ValidationRecord) -> None:
        """Print the validation loss."""
        self._print(f"  step {record.step}/{self._steps}  validation loss {record.loss:.4f}")

    def on_checkpoint(self, path: Path) -> None:
        """Print where the checkpoint is."""
        self._print(f"  checkpoint: {path}")


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Event]:
    """Turn the first SIGINT or SIGTERM into an event that is set; the second one acts as usual.

    The first one writes a notice to standard error. In the main thread only.
    """
    stop = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        restore.close()
        # Past Python's buffers: the signal may have come in the middle of a write to them.
        with contextlib.suppress(OSError):
            os.write(2, _NOTICE)

    with contextlib.ExitStack() as restore:
        for number in (signal.SIGINT, signal.SIGTERM):
            restore.callback(signal.signal, number, signal.signal(number, handle))
        yield stop
