"""Results of one command: one file, JSON or CSV, with everything needed to repeat it."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1


def write_results(
    path: Path,
    benchmark: str,
    rows: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
    settings: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> None:
    """Write JSON or CSV, by the suffix of `path`; CSV has the rest as `#` lines above.

    Args:
        path: What `check_output` lets pass.
        benchmark: Its name, as in `float8 bench linear`: `linear`.
        rows: The measurements.
        environment: Hardware, versions, commit and command.
        settings: What was asked for.
        extra: What does not belong to one row.
    """
    head = {"schema": SCHEMA, "benchmark": benchmark}
    rest = {"environment": environment, "settings": settings, "extra": extra}
    if path.suffix == ".json":
        everything = _plain({**head, "rows": rows, **rest})
        path.write_text(json.dumps(everything, indent=1, allow_nan=False) + "\n")
        return
    with path.open("w", newline="") as file:
        for key, value in {**head, **rest}.items():
            file.write(f"# {key}: {json.dumps(_plain(value))}\n")
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def check_output(path: Path) -> None:
    """Refuse a path that results cannot go to, before anything is measured.

    Raises:
        ValueError: Its suffix is unknown, or its folder is not there.
    """
    if path.suffix not in (".json", ".csv"):
        raise ValueError(f"output: got {path.name!r}, expected a name ending in .json or .csv")
    if not path.parent.is_dir():
        raise ValueError(f"output: there is no folder {path.parent}")


def _plain(value: Any) -> Any:
    """JSON has no infinities: the SQNR of equal results becomes null."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
