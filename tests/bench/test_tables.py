"""What is written from results files: tables, the picture of README.md, limits of size."""

import json
from pathlib import Path

import pytest

from float8.convert.smallest import SMALLEST
from float8_lab.bench import limits, picture, tables
from float8_lab.cli.main import main


def test_the_pages_are_up_to_date(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {page for page, _ in tables.SECTIONS} == {tables.README, tables.PERFORMANCE}
    assert main(["bench", "tables", "--check"]) == 0, "run float8 bench tables"
    before = tables.PERFORMANCE.read_text()
    monkeypatch.setitem(tables._STEP, "ms", ("ms", 3))
    assert main(["bench", "tables", "--check"]) == 1
    assert "README.md and performance.md: not up to date" in capsys.readouterr().err
    assert before == tables.PERFORMANCE.read_text()


def test_the_markers_must_be_there() -> None:
    with pytest.raises(ValueError, match="page: expected the lines"):
        tables.updated("no markers", "begin", "end", "table")


def test_layers_by_width_have_a_row_each_and_no_sums() -> None:
    rows = [
        {"set": "widths", "K": K, "M": 8192, "recipe": recipe, "mode": mode, "ms": 1, "speedup": 2}
        for K in (512, 768, None)  # sums have none
        for recipe in ("bf16", "delayed")
        for mode in ("compiled", "graphed")
    ]
    lines = tables.linear_table({"rows": rows, "environment": {}})[2:]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[::2]] == [
        ["recipe", "width", "compiled speedup", "graphed speedup"],
        ["delayed", "512", "2.00", "2.00"],
    ]
    assert len(lines) == 4


def test_the_picture_is_up_to_date() -> None:
    image = pytest.importorskip("PIL.Image").open(picture.PICTURE)
    what = picture.shown(picture.RESULTS)
    assert min(len(what["points"]), len(what["curves"])) > 2
    remedy = "run python -m float8_lab.bench.picture"
    assert json.loads(image.text[picture.SHOWN]) == what, remedy
    assert all(
        f"[{name}]" in picture.ROOT.joinpath("README.md").read_text() for name in picture.FILES
    )


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_those_of_an_h200_are_what_its_file_gives() -> None:
    results = json.loads((RESULTS / "h200-smallest-layers.json").read_text())
    gpu, found = limits.fit_results(results)
    assert {recipe: each.limits for recipe, each in found.items()} == SMALLEST[gpu]
