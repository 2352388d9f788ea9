"""The table of common models in docs/measuring.md is what the conversion report says today."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["bert_large", "llama32_1b", "mixtral_8x7b"])
def test_rows_are_up_to_date(name: str) -> None:
    spec = importlib.util.spec_from_file_location("common", ROOT / "benchmarks/common_models.py")
    assert spec is not None
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    cells = [line.strip("| ") for line in common.PAGE.read_text().splitlines()]
    found = [" ".join(cell.replace("|", " ").split()) for cell in cells]
    assert " ".join(common.row(getattr(common, name))) in found, (
        "python -m benchmarks.common_models"
    )
