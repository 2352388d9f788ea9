"""The tables of README.md and docs/performance.md, and estimates, are what results files give."""

import pytest

from float8_lab.bench import tables
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
