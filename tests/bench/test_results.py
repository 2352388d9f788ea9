"""Result files."""

import json
import math
from pathlib import Path

from float8_lab.bench.results import write_results

ROWS = [
    {"M": 64, "recipe": "bf16", "speedup": 1.0, "db": math.inf},
    {"M": 64, "recipe": "x", "speedup": 1.23456789, "db": 20.0},
]
RESULTS = {"benchmark": "linear", "rows": ROWS, "environment": {"device": "a GPU"}}
RESULTS |= {"settings": {"rounds": 2}, "extra": {"copy": 1.5}}


def test_json_holds_everything(tmp_path: Path) -> None:
    write_results(tmp_path / "x.json", RESULTS)
    text = (tmp_path / "x.json").read_text()
    assert len(text.splitlines()) < 20  # a row is a line
    read = json.loads(text)
    assert read.keys() == {"schema", *RESULTS}
    assert read["environment"] == {"device": "a GPU"}
    assert [row["db"] for row in read["rows"]] == [None, 20.0]
    assert read["rows"][1]["speedup"] == 1.23457
    write_results(tmp_path / "x.json", {**RESULTS, "rows": []})
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == []
