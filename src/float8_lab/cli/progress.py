"""A run on the terminal: what it shows, and signals that ask it to stop."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.metrics import RATES, Observer, StepRecord, ValidationRecord

_PLAIN_WIDTH = 120  # A log has no width; this one holds the widest table.
_BAR, _WIDE = 8, 70  # Columns: of the bar; from which the time left is shown.
_STATUS = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # what the others leave


def make_console() -> Console:
    """The console on standard output."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    return console


class ConsoleProgress(Observer):
    """Shows loss, speed, step time and memory: in a bar, or in lines without a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._steps = 0

    def on_start(self, config: TrainConfig, step: int, about: str) -> None:
        """Say what is trained on what, and start the bar."""
        self._steps = config.steps
        self._console.print(about)
        if step:
            self._console.print(f"  resumed after step {step}")
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(_BAR),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}", table_column=_STATUS),
                *[TimeRemainingColumn()] * (self._console.width >= _WIDE),
                console=self._console,
                expand=True,
            )
            self._bar.add_task(config.recipe, total=config.steps, completed=step, status="")
            self._bar.start()

    def on_step(self, step: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def on_records(self, records: Sequence[StepRecord]) -> None:
        """Show the mean of these steps."""
        step, memory = records[-1].step, records[-1].memory_bytes
        loss = sum(record.loss for record in records) / len(records)
        seconds = sum(record.seconds for record in records) / len(records)
        speed = f"{records[-1].tokens / seconds:,.0f} tok/s"
        parts = [f"loss {loss:.4f}", speed, f"{1e3 * seconds:.0f} ms"]
        if memory is not None:
            parts.append(f"{memory / 2**30:.2f} GiB")
        for name, text in RATES.items():
            if (rate := getattr(records[-1], name)) is not None:
                parts.append(text.format(rate * records[-1].seconds / seconds))
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], status="  ".join(parts))
        else:
            self._console.print(f"  step {step}/{self._steps}  {'  '.join(parts)}")

    def on_validation(self, record: ValidationRecord) -> None:
        """Print the validation loss."""
        self._console.print(
            f"  step {record.step}/{self._steps}  validation loss {record.loss:.4f}"
        )

    def on_checkpoint(self, path: Path) -> None:
        """Print where the checkpoint is."""
        self._console.print(f"  checkpoint: {path}")

    def on_end(self, status: str, step: int) -> None:
        """Take the bar down, so that what follows is not drawn over."""
        if self._bar is not None:
            self._bar.stop()


@contextlib.contextmanager
def stop_on_signals(notice: str = "") -> Iterator[Event]:
    """Turn the first SIGINT or SIGTERM into an event that is set; the second one acts as usual.

    The notice goes to standard error when the first one comes. In the main thread only.
    """
    stop = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        restore.close()
        # Past Python's buffers: the signal may have come in the middle of a write to them.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{notice}\n".encode() if notice else b"")

    with contextlib.ExitStack() as restore:
        for number in (signal.SIGINT, signal.SIGTERM):
            restore.callback(signal.signal, number, signal.signal(number, handle))
        yield stop
