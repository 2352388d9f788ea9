"""The README's performance tables are those that the results files give."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from support.scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("readme_table")


def test_the_readme_is_up_to_date(script: ModuleType) -> None:
    readme = script.README.read_text()
    assert readme == script.updated(readme, script.tables(script.RESULTS)), (
        "run python benchmarks/readme_table.py"
    )


def test_every_benchmark_becomes_a_table(script: ModuleType, tmp_path: Path) -> None:
    environment = {"device": "a GPU", "torch": "2.11", "command": "float8 bench", "torchao": "1.0"}
    size = {"model": "tiny", "blocks": 2, "batch": 1, "seq_len": 64}
    block = [
        {"recipe": "bf16", "mode": "compiled", "ms": 8.0, "speedup": 1.0, "peak_gib": 2.0},
        {"recipe": "torchao x", "mode": "compiled", "ms": 4.0, "speedup": 2.0, "peak_gib": None},
        {"recipe": "bf16", "mode": "eager", "ms": 9.0, "speedup": 1.0, "peak_gib": 2.0},
    ]
    shape = {"set": "given", "M": 1, "K": 2, "N": 3}
    timed = {"recipe": "bf16", "mode": "eager", "ms": 1.0, "speedup": 1.0, "floor_ms": 0.5}
    cast = [{"case": "cast row+col", "of_copy": share} for share in (0.9, 0.95)]
    for name, rows in (("block", block), ("linear", [{**shape, **timed}]), ("cast", cast)):
        results = {"benchmark": name, "environment": environment, "settings": size, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
    (tmp_path / "other.json").write_text("{}")
    lines = script.tables(tmp_path).splitlines()
    assert lines[0].startswith("| 2 blocks of tiny, 1 x 64 tokens, forward + backward | compiled")
    assert "| bf16 | 8.0 | 1.00 | 2.00 | 9.0 | 1.00 |" in lines
    assert "| torchao 1.0 x | 4.0 | 2.00 |  |  |  |" in lines
    assert "| 1 x 2 x 3 | bf16 |  |  | 1.00 | 1.00 | 0.50 |" in lines
    assert "runs at 0.90 to 0.95 of copy bandwidth. a GPU, torch 2.11 ([results]" in lines[-1]


def test_several_microbatches_are_named(script: ModuleType, tmp_path: Path) -> None:
    environment = {"device": "a GPU", "torch": "2.11", "command": "float8 bench"}
    size = {"model": "tiny", "blocks": 1, "batch": 1, "seq_len": 64, "microbatches": 4}
    rows = [{"recipe": "tensorwise, cached weights", "mode": "eager", "ms": 9.0, "speedup": 1.0}]
    results = {"benchmark": "block", "environment": environment, "settings": size, "rows": rows}
    (tmp_path / "block.json").write_text(json.dumps(results))
    lines = script.tables(tmp_path).splitlines()
    assert "| 1 block of tiny, 1 x 64 tokens, forward + backward of 4 microbatches |" in lines[0]
    assert "| tensorwise, cached weights |  |  |  | 9.0 | 1.00 |" in lines


def test_sharded_training_is_shown_by_gather(script: ModuleType, tmp_path: Path) -> None:
    environment = {"device": "a GPU", "torch": "2.11", "command": "float8 bench", "torchao": "1.0"}
    size = {"model": "tiny", "blocks": 2, "batch": 1, "seq_len": 64, "ranks": 4}
    base = {"gather": "bf16", "ms": 8.0, "tokens_per_s": 32000.0, "speedup": 1.0}
    base |= {"gathered_mb": 2400.0, "exposed_ms": 1.25, "peak_gib": 3.0}
    rows = [
        {**base, "recipe": "bf16", "mode": "compiled"},
        {**base, "recipe": "torchao tensorwise", "mode": "eager", "gather": "float8"},
    ]
    results = {"benchmark": "fsdp", "environment": environment, "settings": size, "rows": rows}
    (tmp_path / "fsdp.json").write_text(json.dumps(results))
    lines = script.tables(tmp_path).splitlines()
    assert "| 2 blocks of tiny, FSDP2 on 4 ranks, 1 x 64 tokens each, forward" in lines[0]
    assert "| bf16 | bf16 | 8.0 | 32,000 | 1.00 | 2.40 | 1.2 | 3.00 |" in lines
    assert lines[3].startswith("| torchao 1.0 tensorwise, eager | float8 | 8.0 |")


def test_the_markers_must_be_there(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="README: expected the lines"):
        script.updated("no markers", "table")
