"""Notebooks run to their end. (Examples that are scripts run in test_docs.py.)"""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    assert notebook.stat().st_size < 60_000, "its outputs are large: leave only those that matter"
    cells = nbformat.read(notebook, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nbclient.NotebookClient(cells, timeout=300, resources=resources).execute()
    shown = [each for cell in cells.cells for each in cell.get("outputs", [])]
    assert not [each for each in shown if each.get("name") == "stderr"]
    assert any("image/png" in each.get("data", {}) for each in shown)
