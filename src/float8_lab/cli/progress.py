"""A run on the terminal: a bar where there is one, plain lines at intervals where there is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from float8_lab.trainer.metrics import Observer, RunInfo, StepRecord, ValidationRecord

_PLAIN_WIDTH = 120  # A log has no width; this one holds the widest table.
_BAR, _TIME, _WIDE = (
    12,
    9,
    70,
)  # Columns: of bar and gaps, of the time left, from which it is shown.
_PLAIN_LINES = 20  # How many progress lines a whole run writes, about.


def make_console() -> Console:
    """The console on standard output."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    return console


class ConsoleProgress(Observer):
    """Shows loss, speed, step time and memory of a run under way."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._steps = 0
        self._line_interval = 1
        self._next_line = 0

    def on_start(self, info: RunInfo) -> None:
        """Say what is trained on what, and start the bar."""
        config, corpus = info.config, info.corpus
        self._steps = config.steps
        self._line_interval = max(config.steps // _PLAIN_LINES, 1)
        self._next_line = info.start_step + self._line_interval
        say = self._console.print
        say(
            f"{config.recipe}: Llama {config.model}, {info.parameters / 1e6:.1f}M parameters, "
            f"{config.dtype}{', compiled' if config.compile else ''} on {config.device}"
            f"{f', {info.ranks} ranks' if info.ranks > 1 else ''}"
        )
        say(
            f"  data: {corpus.name}, {len(corpus.train) / 1e6:.1f} MB in {corpus.train_files} "
            f"file(s), {config.tokens_per_step:,} tokens per step"
        )
        if info.conversion:
            say(f"  {info.conversion.splitlines()[0]}")
        if info.start_step:
            say(f"  resumed after step {info.start_step}")
        if self._console.is_terminal:
            columns: list[ProgressColumn] = [
                TextColumn("{task.description}"),
                BarColumn(None, table_column=Column(ratio=1)),  # what the others leave
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
            ]
            if self._console.width >= _WIDE:
                columns.append(TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, expand=True)
            self._bar.add_task(
                config.recipe, total=config.steps, completed=info.start_step, status=""
            )
            self._bar.start()

    def on_step(self, step: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def on_records(self, records: Sequence[StepRecord]) -> None:
        """Show the mean of these steps."""
        loss = sum(record.loss for record in records) / len(records)
        seconds = sum(record.seconds for record in records) / len(records)
        parts = [
            f"loss {loss:.4f}",
            f"{records[-1].tokens / seconds:,.0f} tok/s",
            f"{1e3 * seconds:.0f} ms",
        ]
        if records[-1].memory_bytes is not None:
            parts.append(f"{records[-1].memory_bytes / 2**30:.2f} GiB")
        step, status = records[-1].step, "  ".join(parts)
        if self._bar is not None:
            task = self._bar.tasks[0]
            others = len(task.description) + 2 * len(str(self._steps)) + _BAR
            others += _TIME if self._console.width >= _WIDE else 0
            while len(parts) > 1 and others + len("  ".join(parts)) > self._console.width:
                parts.pop()
            self._bar.update(task.id, status="  ".join(parts))
        elif step >= self._next_line or step == self._steps:
            self._console.print(f"  step {step}/{self._steps}  {status}")
            self._next_line = step + self._line_interval

    def on_validation(self, record: ValidationRecord) -> None:
        """Print the validation loss."""
        self._console.print(
            f"  step {record.step}/{self._steps}  validation loss {record.loss:.4f}"
        )

    def on_checkpoint(self, path: Path) -> None:
        """Print where the checkpoint is."""
        self._console.print(f"  checkpoint: {path}")

    def close(self) -> None:
        """Take the bar down, so that what follows is not drawn over."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
