"""Records of a run, observers that are told of them, and the file that they are read back from.

An observer has some of these methods:

- `on_start(config, step, about)`: the run `about` something goes on after `step` steps
- `on_step(step)`: a step was sent to the device, which still works
- `on_records(records)`: these steps are done, oldest first
- `on_validation(record)`, `on_checkpoint(path)`: one was done, or written
- `on_end(status, step)`: the run ended, whatever happened; files are let go of
"""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from float8_lab.errors import ConfigError
from float8_lab.trainer.config import TrainConfig, check_types

FINISHED, INTERRUPTED, STOPPED, FAILED = "finished", "interrupted", "stopped", "failed"


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, counted from 1."""

    step: int
    loss: float  # mean over the step's tokens, nats per byte
    grad_norm: float  # of the whole model, before clipping
    learning_rate: float
    seconds: float
    tokens: int
    timed: bool  # whether it counts for throughput, being past compilation and warm-up
    memory_bytes: int | None  # highest of tensors until now; of GPUs


@dataclass(frozen=True)
class ValidationRecord:
    """One validation: mean loss in nats per byte after `step` optimizer steps."""

    step: int
    loss: float


class JsonLines:
    """Append one JSON object per event to a file, each as soon as it is known.

    Non-finite numbers are written as the strings "nan", "inf" and "-inf".
    """

    def __init__(self, path: Path) -> None:
        # A killed process may have left half a line: start on a fresh one.
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._path, self._before = path, "\n" * torn

    def _write(self, kind: str, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = str(value)
        with self._path.open("a") as file:
            file.write(self._before + json.dumps({"kind": kind, **values}) + "\n")
        self._before = ""

    def on_start(self, config: TrainConfig, step: int, about: str) -> None:
        """Note where the run starts."""
        self._write("start", step=step, time=time.time())

    def on_records(self, records: Sequence[StepRecord]) -> None:
        """Write the steps."""
        for record in records:
            speed = round(record.tokens / record.seconds, 1) if record.seconds else None
            self._write("train", **vars(record), tokens_per_s=speed)

    def on_validation(self, record: ValidationRecord) -> None:
        """Write the validation loss."""
        self._write("validation", **vars(record))

    def on_end(self, status: str, step: int) -> None:
        """Note how the run ended."""
        self._write("end", step=step, status=status, time=time.time())


class TensorBoard:
    """Write the curves as TensorBoard events."""

    def __init__(self, folder: Path, start_step: int) -> None:
        # Here and not above: it takes a second to import, also for runs that don't want it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def on_records(self, records: Sequence[StepRecord]) -> None:
        """Write the steps."""
        for record in records:
            values = {"loss/train": record.loss, "optimizer/grad_norm": record.grad_norm}
            values["optimizer/learning_rate"] = record.learning_rate
            if record.timed:
                values["speed/tokens_per_s"] = record.tokens / record.seconds
            if record.memory_bytes is not None:
                values["memory/peak_gib"] = record.memory_bytes / 2**30
            for name, value in values.items():
                self._writer.add_scalar(name, value, record.step)

    def on_validation(self, record: ValidationRecord) -> None:
        """Write the validation loss."""
        self._writer.add_scalar("loss/validation", record.loss, record.step)

    def on_end(self, status: str, step: int) -> None:
        """Close the file."""
        self._writer.close()


@dataclass
class Metrics:
    """A run's record as read back: steps and validations in order, each step once."""

    train: list[StepRecord] = field(default_factory=list)
    validation: list[ValidationRecord] = field(default_factory=list)
    status: str = ""  # how the run ended; empty if it is still going or was killed


def read_metrics(path: Path) -> Metrics:
    """Read what `JsonLines` wrote, across resumes; of a file that is not there nothing.

    Steps taken again count once, as taken last; half lines are passed over, others raise.
    """
    metrics = Metrics()
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            _add(metrics, **json.loads(line.decode()))
        except json.JSONDecodeError:
            continue
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            got = f"{path}: got the line {line[:80]!r} (number {number})"
            raise ConfigError(f"{got}, expected a record of a run: delete that line") from error
    return metrics


def _add(metrics: Metrics, kind: str, step: int, **values: Any) -> None:
    """Add one event as `JsonLines` writes it."""
    values |= {name: float(x) for name, x in values.items() if x in ("nan", "inf", "-inf")}
    if kind == "start":
        metrics.train = [record for record in metrics.train if record.step <= step]
        metrics.validation = [record for record in metrics.validation if record.step <= step]
        metrics.status = ""
    elif kind == "train":
        recorded = {name: x for name, x in values.items() if name in StepRecord.__annotations__}
        metrics.train.append(check_types(StepRecord(step, **recorded)))
    elif kind == "validation":
        metrics.validation.append(check_types(ValidationRecord(step, **values)))
    elif kind == "end":
        metrics.status = values["status"]


MEAN = "mean of the last tenth of the steps, at most 100"


def summarize(metrics: Metrics) -> dict[str, Any]:
    """The numbers by which runs are compared; None where a run has not got that far or diverged.

    The training loss is a `MEAN`. Times are medians over the steps past warm-up.
    """
    train = metrics.train
    last = [record.loss for record in train[-min(max(len(train) // 10, 1), 100) :]]
    train_loss = statistics.fmean(last) if last else math.nan
    val_loss = metrics.validation[-1].loss if metrics.validation else math.nan
    seconds = [record.seconds for record in train if record.timed and record.seconds > 0]
    middle = statistics.median_high(seconds) if seconds else None
    return {
        "steps": train[-1].step if train else 0,
        "train_loss": train_loss if math.isfinite(train_loss) else None,  # JSON has no NaN
        "val_loss": val_loss if math.isfinite(val_loss) else None,  # of the last validation
        "tokens_per_s": train[-1].tokens / middle if middle else None,
        "step_ms": 1e3 * middle if middle else None,
        "peak_memory_bytes": train[-1].memory_bytes if train else None,
    }
