"""Results of one command: one file, JSON or CSV, with everything needed to repeat it."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
SUFFIXES = (".json", ".csv")


@dataclass
class Results:
    """What one command measured.

    Attributes:
        benchmark: Its name, as in `float8 bench linear`: `linear`.
        environment: Hardware, versions, commit and command.
        settings: What was asked for.
        rows: The measurements.
        extra: What does not belong to one row.
    """

    benchmark: str
    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write JSON or CSV, by the suffix of `path`; CSV has the rest as `#` lines above."""
        check_output(path)
        head: dict[str, Any] = {"schema": SCHEMA, "benchmark": self.benchmark}
        rest = {"environment": self.environment, "settings": self.settings, "extra": self.extra}
        if path.suffix == ".json":
            everything = _plain({**head, "rows": self.rows, **rest})
            path.write_text(json.dumps(everything, indent=1, allow_nan=False) + "\n")
            return
        with path.open("w", newline="") as file:
            for key, value in {**head, **rest}.items():
                file.write(f"# {key}: {json.dumps(_plain(value))}\n")
            writer = csv.DictWriter(file, list(self.rows[0]) if self.rows else [])
            writer.writeheader()
            writer.writerows(self.rows)


def check_output(path: Path) -> None:
    """Refuse a path that results cannot go to, before anything is measured.

    Raises:
        ValueError: Its suffix is unknown, or its folder is not there.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"output: got {path.name!r}, expected a name ending in .json or .csv")
    if not path.parent.is_dir():
        raise ValueError(f"output: there is no folder {path.parent}")


def _plain(value: Any) -> Any:
    """JSON has no infinities: the SQNR of equal results becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
