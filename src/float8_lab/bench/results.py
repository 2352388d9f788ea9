"""Results of one command: a JSON file with everything that is needed to repeat it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_output(path: Path) -> None:
    """Refuse a path that results cannot go to, before anything is measured."""
    if path.suffix != ".json":
        raise ValueError(f"output: got {path.name!r}, expected a name ending in .json")
    if not path.parent.is_dir():
        raise ValueError(f"output: there is no folder {path.parent}")


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write JSON, one of `results["rows"]` in a line, numbers with six digits.

    `environment` says where rows were measured, `settings` what was asked for, and `extra` is what
    does not belong to one row.
    """
    # JSON has no infinities: the SQNR of equal results becomes null.
    plain = json.loads(
        json.dumps({"schema": 1, **results}),
        parse_constant=lambda name: None,
        parse_float=lambda digits: float(f"{float(digits):.6g}"),
    )
    rows = ",\n  ".join(map(json.dumps, plain.pop("rows")))
    path.write_text(f'{json.dumps(plain, indent=1)[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')
