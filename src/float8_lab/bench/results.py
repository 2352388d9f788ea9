"""Results of one command: a JSON file with everything that is needed to repeat it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_output(path: Path | None) -> None:
    """Refuse a path that results cannot go to, before anything is measured."""
    if path is None:
        return
    if path.suffix != ".json":
        raise ValueError(f"output: got {path.name!r}, expected a name ending in .json")
    if not path.parent.is_dir():
        raise ValueError(f"output: there is no folder {path.parent}")


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write JSON, one of `results["rows"]` in a line, numbers with six digits."""
    # JSON has no infinities: the SQNR of equal results becomes null.
    shorten: Any = {"parse_constant": lambda name: None}
    shorten["parse_float"] = lambda digits: float(f"{float(digits):.6g}")
    plain = json.loads(json.dumps({"schema": 1, **results}), **shorten)
    rows = ",\n  ".join(map(json.dumps, plain.pop("rows")))
    path.write_text(f'{json.dumps(plain, indent=1)[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')


def size_of(settings: Mapping[str, Any]) -> str:
    """Return model and tokens in words, of a `Size` or of the settings of results."""
    n = settings["blocks"]
    blocks = f"{n} block{'s' * (n > 1)} of " if n else "the whole "
    tokens = "{batch} x {seq_len} tokens".format(**settings)
    return f"{blocks}{settings['model']}, {tokens}"
