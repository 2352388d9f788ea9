"""A run on the terminal: a bar where there is one, plain lines at intervals where there is not."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from float8_lab.trainer.metrics import Observer, StepRecord, ValidationRecord

if TYPE_CHECKING:
    from float8_lab.trainer.loop import Trainer

_PLAIN_WIDTH = 120  # A log has no width; this one holds the widest table.
_BAR, _WIDE = 12, 70  # Columns: of bar and gaps; from which the time left is shown.
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
        self._steps = self._last_line = 0

    def on_start(self, run: "Trainer") -> None:
        """Say what is trained on what, and start the bar."""
        config, corpus, say = run.config, run.corpus, self._console.print
        self._steps, self._last_line = config.steps, run.step
        say(
            f"{config.recipe}: Llama {config.model}, "
            f"{config.model_config().num_parameters / 1e6:.1f}M parameters, "
            f"{config.dtype}{', compiled' if config.compile else ''} on {config.device}"
            f"{f', {run.ranks.size} ranks' if run.ranks.size > 1 else ''}"
        )
        say(
            f"  data: {corpus.name}, {len(corpus.train) / 1e6:.1f} MB in {corpus.train_files} "
            f"file(s), {config.tokens_per_step:,} tokens per step"
        )
        if run.conversion:
            say(f"  {run.conversion.splitlines()[0]}")
        if run.step:
            say(f"  resumed after step {run.step}")
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(None, table_column=Column(ratio=1)),  # what the others leave
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                *[TimeRemainingColumn()] * (self._console.width >= _WIDE),
                console=self._console,
                expand=True,
            )
            self._bar.add_task(config.recipe, total=config.steps, completed=run.step, status="")
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
        if self._bar is not None:
            task = self._bar.tasks[0]
            room = self._console.width - _BAR - len(task.description) - 2 * len(str(self._steps))
            room -= len("  -:--:--") if self._console.width >= _WIDE else 0
            while len(parts) > 1 and len("  ".join(parts)) > room:
                parts.pop()
            self._bar.update(task.id, status="  ".join(parts))
        elif step >= self._last_line + self._steps // _PLAIN_LINES or step == self._steps:
            self._console.print(f"  step {step}/{self._steps}  {'  '.join(parts)}")
            self._last_line = step

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
