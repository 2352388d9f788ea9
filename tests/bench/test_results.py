"""Result files and plots."""

import csv
import json
import math
from pathlib import Path

import pytest

from float8_lab.bench.results import check_output, plot_speedups, write_results

ROWS = [
    {"M": 64, "K": 32, "N": 16, "recipe": "bf16", "mode": "eager", "speedup": 1.0, "db": math.inf},
    {"M": 64, "K": 32, "N": 16, "recipe": "x", "mode": "eager", "speedup": 1.23456789, "db": 20.0},
    {"M": "sum", "K": None, "N": None, "recipe": "x", "mode": "eager", "speedup": 9.0, "db": 1.0},
]
RESULTS = {"benchmark": "linear", "rows": ROWS, "environment": {"device": "a GPU"}}
RESULTS |= {"settings": {"rounds": 2}, "extra": {"host_us": {"x": 1.5}}}


def test_json_holds_everything(tmp_path: Path) -> None:
    write_results(tmp_path / "x.json", RESULTS)
    read = json.loads((tmp_path / "x.json").read_text())
    assert list(read) == ["schema", "benchmark", "rows", "environment", "settings", "extra"]
    assert read["benchmark"] == "linear"
    assert read["environment"] == {"device": "a GPU"}
    assert [row["db"] for row in read["rows"]] == [None, 20.0, 1.0]
    assert read["rows"][1]["speedup"] == 1.23457


def test_csv_has_the_rest_above_the_rows(tmp_path: Path) -> None:
    write_results(tmp_path / "x.csv", RESULTS)
    lines = (tmp_path / "x.csv").read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert '# environment: {"device": "a GPU"}' in head
    rows = list(csv.DictReader(lines[len(head) :]))
    assert [row["recipe"] for row in rows] == ["bf16", "x", "x"]


def test_a_path_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ending in \.json or \.csv"):
        check_output(tmp_path / "x.txt")
    with pytest.raises(ValueError, match="there is no folder"):
        check_output(tmp_path / "missing" / "x.json")


def test_plot(tmp_path: Path) -> None:
    plot_speedups(ROWS, "title", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
