"""An observer of training runs that writes down what it hears."""

from collections.abc import Callable, Sequence
from pathlib import Path

from float8_lab.trainer.metrics import StepRecord


class Listener:
    """Writes down what it is told, and can act on a step."""

    def __init__(self, act: Callable[[int], None] = lambda step: None) -> None:
        self.events: list[str] = []
        self.records: list[StepRecord] = []
        self._act = act

    def on_step(self, step: int) -> None:
        self._act(step)

    def on_records(self, records: Sequence[StepRecord]) -> None:
        self.records += records
        self.events.append(f"records to {records[-1].step}")

    def on_validation(self, record: object) -> None:
        self.events.append("validation")

    def on_checkpoint(self, path: Path) -> None:
        self.events.append(f"checkpoint {int(path.name[5:])}")

    def on_end(self, status: str, step: int) -> None:
        self.events.append(f"{status} {step}")
