"""Tables of pages are written from results files, and a command that exists makes each again."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from float8_lab.bench import tables
from float8_lab.cli.bench import app
from float8_lab.cli.main import main


def test_the_pages_are_up_to_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {section.page for section in tables.SECTIONS}
    assert pages == {tables.README, tables.PERFORMANCE, tables.TRAINER}
    assert main(["bench", "tables", "--check"]) == 0, "run float8 bench tables"
    before = tables.PERFORMANCE.read_text()
    with monkeypatch.context() as patch:
        patch.setitem(tables._STEP, "ms", ("ms", 3))
        assert main(["bench", "tables", "--check"]) == 1
    assert "performance.md: not up to date" in capsys.readouterr().err
    assert before == tables.PERFORMANCE.read_text()
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "none")  # as where a wheel is installed
    assert main(["bench", "tables", "--check"]) == 2
    assert "expected that of a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("section", tables.SECTIONS, ids=lambda section: section.name)
def test_the_command_of_a_table_exists(section: tables.Section) -> None:
    results = json.loads((tables.RESULTS / f"{section.file}.json").read_text())
    program, bench, name, *options = shlex.split(results["environment"]["command"])
    assert (program, bench) == ("float8", "bench")
    commands: Any = typer.main.get_command(app)
    commands.commands[name].make_context(name, options)  # raises at what it does not know


def test_a_section_has_picture_table_failures_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    columns = {"ms": ("ms", 1), "GiB": ("peak_gib", 2), "drift, %": ("drift_percent", 1)}
    about = "{size}, {ranks} GPU"
    section = tables.Section(tmp_path / "page.md", "x", "x", about, columns)
    rows = [
        {"recipe": "bf16", "mode": "eager", "ms": 1234.56, "drift_percent": -1.25},
        {"recipe": "bf16", "mode": "graphed", "ms": 0.96, "drift_percent": None, "peak_gib": None},
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
        "| recipe                 | graphed ms | eager ms | drift, % |",
        "| ---------------------- | ---------: | -------: | -------: |",
        "| bf16                   |        1.0 |  1,234.6 |     -1.2 |",
        "| torchao 0.17.0 rowwise |            |      2.0 |      0.0 |",
        "",
        "H200, torch 2.11, commit 0123456-dirty. Results in",
        "[x.json](x.json), by",
        "",
        "```bash",
        "float8 bench model --model 1b",
        "```",
        "",
        "Each was timed twice, but for 1 that a time limit cut off; the two times differ by up to "
        "1.2 %.",
        "",
        "Failed, and so not measured: torchao rowwise, graphed.",
        "",
    ]
    with pytest.raises(ValueError, match=r"x\.json: expected rows with 'us', got recipe, mode, ms"):
        tables.written(section._replace(columns={"us": ("us", 1)}))


def test_columns_may_be_values_of_any_key() -> None:
    page = tables.README
    section = tables.Section(page, "x", "x", "x", {"": ("ms", 2)}, across=("K", (8, 16, 32)))
    rows = [{"recipe": "a", "K": 16, "ms": -0.001}, {"recipe": "b", "K": 8, "ms": 2}]
    rows += [{"recipe": "b", "K": 64, "ms": 1}, {"recipe": "b", "K": None, "ms": 3}]
    assert tables.pivot(section, {"environment": {}, "rows": rows})[::2] == [
        "| recipe |    8 |   16 |",
        "| a      |      | 0.00 |",
    ]
    with pytest.raises(ValueError, match="page: expected the lines"):
        tables.updated("no markers", "begin", "end", "table")
