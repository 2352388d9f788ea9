"""What is written from results files: tables, limits of size."""

import json
from pathlib import Path

import pytest

from float8.convert.speed import SMALLEST
from float8_lab.bench import limits, tables
from float8_lab.bench.results import drift_of
from float8_lab.cli.main import main


def test_the_pages_are_up_to_date(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {section.page for section in tables.SECTIONS} == {
        tables.README,
        tables.PERFORMANCE,
        tables.TRAINER,
    }
    assert main(["bench", "tables", "--check"]) == 0, "run float8 bench tables"
    before = tables.PERFORMANCE.read_text()
    monkeypatch.setitem(tables._STEP, "ms", ("ms", 3))
    assert main(["bench", "tables", "--check"]) == 1
    assert "performance.md: not up to date" in capsys.readouterr().err
    assert before == tables.PERFORMANCE.read_text()


def test_an_install_has_no_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README", "RESULTS"):
        monkeypatch.setattr(tables, name, tmp_path / name)
    assert main(["bench", "tables", "--check"]) == 2
    assert "expected that of a checkout" in capsys.readouterr().err


def test_a_section_has_picture_table_failures_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    columns = {"ms": ("ms", 1), "GiB": ("peak_gib", 2), "drift, %": ("drift_percent", 1)}
    about = "{size}, {ranks} GPU"
    section = tables.Section(tmp_path / "page.md", "x", "x", about, columns)
    rows = [
        {"recipe": "bf16", "mode": "eager", "ms": 1234.56, "drift_percent": -1.25},
        {"recipe": "bf16", "mode": "graphed", "ms": 0.96, "drift_percent": 0.5, "peak_gib": None},
        {"recipe": "torchao rowwise", "mode": "eager", "ms": 2, "drift_percent": 0},
        {"recipe": "torchao rowwise", "mode": "graphed", "left_out": "Error: no graphs"},
    ]
    made = "float8 bench model --model 1b -o /a/x.json --plot x.png"
    environment = {"device": "H200", "torch": "2.11", "git_commit": "0123456789-dirty"}
    environment |= {"command": made, "torchao": "0.17.0"}
    settings = {"model": "1b", "blocks": None, "batch": 2, "seq_len": 64, "ranks": 1}
    results = {"environment": environment, "settings": settings, "rows": rows}
    (tmp_path / "x.json").write_text(json.dumps(results))
    (tmp_path / "x.png").touch()
    assert tables.written(section).splitlines() == [
        "",
        "![The whole 1b, 2 x 64 tokens, 1 GPU](x.png)",
        "",
        "**The whole 1b, 2 x 64 tokens, 1 GPU**",
        "",
        "| recipe                 | graphed ms | drift, % | eager ms | drift, % |",
        "| ---------------------- | ---------: | -------: | -------: | -------: |",
        "| bf16                   |        1.0 |      0.5 |  1,234.6 |     -1.2 |",
        "| torchao 0.17.0 rowwise |            |          |      2.0 |      0.0 |",
        "",
        "H200, torch 2.11, commit 0123456-dirty. Results in",
        "[x.json](x.json), by",
        "",
        "```bash",
        "float8 bench model --model 1b",
        "```",
        "",
        "Each was timed twice; the two times differ by up to 1.2 %.",
        "",
        "Failed, and so not measured: torchao rowwise, graphed.",
        "",
    ]
    with pytest.raises(ValueError, match=r"x\.json: expected rows with 'us', got recipe, mode, ms"):
        tables.written(section._replace(columns={"us": ("us", 1)}))
    with pytest.raises(ValueError, match=r"x\.json: expected rows with 'width', got recipe, mode"):
        tables.written(section._replace(across=("width", (64,))))
    with pytest.raises(ValueError, match=r"x\.json: expected settings with 'keep' for the title"):
        tables.written(section._replace(title="{keep}"))


def test_what_was_timed_once_is_told() -> None:
    rows = [{"ms": 1.0, "drift_percent": -0.5}, {"ms": 1.0, "drift_percent": None}, {"ms": 2.0}]
    assert drift_of([*rows, {"left_out": "Error: x"}]) == (
        "Each was timed twice, but for 2 that a time limit cut off; the two times differ by up to "
        "0.5 %."
    )
    assert drift_of(rows[1:]) == ""


def test_columns_may_be_values_of_any_key() -> None:
    page = tables.README
    section = tables.Section(page, "x", "x", "x", {"": ("ms", 2)}, across=("K", (8, 16, 32)))
    rows = [{"recipe": "a", "K": 16, "ms": -0.001}, {"recipe": "b", "K": 8, "ms": 2}]
    rows += [{"recipe": "b", "K": 64, "ms": 1}, {"recipe": "b", "K": None, "ms": 3}]
    assert tables.pivot(section, {"environment": {}, "rows": rows})[::2] == [
        "| recipe |    8 |   16 |",
        "| a      |      | 0.00 |",
    ]


def test_the_markers_must_be_there() -> None:
    with pytest.raises(ValueError, match="page: expected the lines"):
        tables.updated("no markers", "begin", "end", "table")


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_those_of_an_h200_are_what_its_file_gives() -> None:
    results = json.loads((RESULTS / "h200-smallest-layers.json").read_text())
    gpu, found = limits.fit_results(results)
    assert {recipe: each.limits for recipe, each in found.items()} == SMALLEST[gpu]
    compiled = [{**row, "mode": "compiled"} for row in results["rows"]]
    with pytest.raises(ValueError, match="results: got no eager rows"):
        limits.fit_results({**results, "rows": compiled})


def test_of_limits_that_cost_as_little_those_that_convert_the_fewest_are_taken() -> None:
    cells = [(64, 16, 1e6, -0.5), (128, 16, 2e6, 1e-4), (256, 16, 4e6, 0.5)]
    assert limits.fit(cells).limits.product == 4e6
    cells[1] = 128, 16, 2e6, 1e-2
    assert limits.fit(cells).limits.product == 2e6
