"""Tables of pages are written from results files, and a command that exists makes each again."""

import json
import re
import shlex
import shutil
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
    assert main(["bench", "tables", "--check"]) == 0, "run float8 bench tables"
    before = tables.PAGE.read_text()
    # So what a section may have is in one.
    assert "](../benchmarks/results/h200-train-8b.png)\n" in before
    assert re.search(r"Timed twice: up to [\d.]+ % apart\.", before)
    with monkeypatch.context() as patch:
        patch.setitem(tables._STEP, "ms", ("ms", 3))
        assert main(["bench", "tables", "--check"]) == 1
    assert "performance.md: not up to date" in capsys.readouterr().err
    assert before == tables.PAGE.read_text()
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


def test_the_picture_is_drawn_beside_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = next(each for each in tables.SECTIONS if each.file == "h200-train-8b")
    shutil.copy(tables.RESULTS / f"{section.file}.json", tmp_path)
    (picture := tmp_path / f"{section.file}.png").touch()
    (page := tmp_path / "page.md").write_text(
        f"<!-- {section.name}: written by float8 bench tables -->\n<!-- end of {section.name} -->\n"
    )
    for name, value in {"RESULTS": tmp_path, "PAGE": page, "SECTIONS": [section]}.items():
        monkeypatch.setattr(tables, name, value)
    assert tables.write_tables(only_check=True)
    assert picture.read_bytes() == b""
    assert tables.write_tables(only_check=False)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "tensorwise" in page.read_text()


def test_what_failed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    environment = {"device": "H200", "torch": "2", "commit": "0123456789-dirty", "command": "x"}
    rows: list[dict[str, Any]] = [{"recipe": "b", "left_out": "no graphs"}]
    rows += [{"recipe": "a", "mode": "eager", "ms": 2}, {"recipe": "c", "mode": "eager", "ms": 2}]
    rows[1]["drift_percent"] = -1.26
    results = {"environment": environment, "settings": {}, "rows": rows}
    (tmp_path / "x.json").write_text(json.dumps(results))
    written = tables.written(tables.Section("x", "x", "x", {"ms": ("ms", 1)}))
    assert written.endswith("\nFailed, and so not measured: b.\n\n")
    assert ", commit 0123456-dirty. Results and" in written
    assert "Timed twice, but for 1 that a time limit cut off: up to 1.3 % apart." in written


def test_columns_are_modes_in_order() -> None:
    section = tables.Section("x", "x", "x", {"ms": ("ms", 2)})
    rows: list[dict[str, Any]] = [{"recipe": "a", "mode": "eager", "ms": 0.001}]
    rows += [{"recipe": "b", "mode": "compiled", "ms": 2}]
    assert tables.pivot(section, {"environment": {}, "rows": rows})[::2] == [
        "| recipe | compiled ms | eager ms |",
        "| a      |             |     0.00 |",
    ]
    wrong = section._replace(columns={"us": ("us", 1)})
    with pytest.raises(ValueError, match=r"x\.json: expected rows with 'us', got recipe, mode, ms"):
        tables.pivot(wrong, {"environment": {}, "rows": rows})
    with pytest.raises(ValueError, match="page: expected the lines"):
        tables.updated("no markers", "begin", "end", "table")
