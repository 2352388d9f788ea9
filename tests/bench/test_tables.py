"""What is written from results files: tables, the picture of README.md, limits of size."""

import json
from pathlib import Path

import pytest

from float8.convert.smallest import SMALLEST
from float8_lab.bench import limits, picture, tables
from float8_lab.bench.shapes import SHAPE_SETS
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


def results() -> dict:
    """Of an H200 on which float8 gains from 1024 tokens, 768 features and a product of 8e9 on."""
    rows = []
    for M, K, N in SHAPE_SETS["grid"]:
        large = M >= 1024 and min(K, N) >= 768 and M * K * N >= 8e9
        size = {"mode": "eager", "M": M, "K": K, "N": N}
        ms = M * K * N / 1e11
        rows.append({**size, "recipe": "bf16", "ms": ms})
        rows.append({**size, "recipe": "tensorwise", "ms": ms / 1.02 if large else ms * 1.2})
    rows.append({"mode": "eager", "M": "sum", "K": None, "recipe": "bf16", "ms": 1.0})
    return {"environment": {"device": "NVIDIA H200"}, "rows": rows}


def test_those_of_an_h200_are_what_its_file_gives() -> None:
    results = json.loads((RESULTS / "h200-smallest-layers.json").read_text())
    gpu, found = limits.fit_results(results)
    assert {recipe: each.limits for recipe, each in found.items()} == SMALLEST[gpu]


def test_they_are_written_where_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TABLE", "PAGE"):
        path = tmp_path / name
        path.write_text(getattr(limits, name).read_text())
        monkeypatch.setattr(limits, name, path)
    path = tmp_path / "h200-x.json"
    path.write_text(json.dumps(results()))
    (found,) = limits.fit_results(results())[1].values()
    assert (found.right, found.loss) == (1.0, 0.0)
    before = limits.PAGE.read_text()
    assert main(["bench", "limits", str(path), "--write"]) == 0
    space: dict = {}
    exec(limits.TABLE.read_text(), space)
    least = space["SMALLEST"]["H200"]["tensorwise"]
    assert least == found.limits
    assert least[:2] == (1024, 768)
    assert space["SMALLEST"]["H100"] == SMALLEST["H100"]
    row = f"| H200 | tensorwise | 1024 | 768 | {least.product / 1e9:g}e9 |"
    assert row in limits.PAGE.read_text()
    assert limits.PAGE.read_text().count("\n") == before.count("\n")
