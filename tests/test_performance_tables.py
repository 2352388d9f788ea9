"""The tables of README.md and docs/performance.md are those that the results files give."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from support.scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("performance_tables")


def rows(text: str) -> list[str]:
    """Lines without what only pads a table for readers of plain text."""
    lines = text.splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [
        " | ".join(found).strip() if line.startswith("|") else line
        for line, found in zip(lines, cells, strict=True)
    ]


def test_the_pages_are_up_to_date(script: ModuleType) -> None:
    assert {page for page, _ in script.SECTIONS} == {script.README, script.PERFORMANCE}
    for (page, name), write in script.SECTIONS.items():
        text = page.read_text()
        assert text == script.updated(text, name, write(script.RESULTS)), (
            "run python benchmarks/performance_tables.py"
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
    for name, found in (("block", block), ("linear", [{**shape, **timed}]), ("cast", cast)):
        results = {"benchmark": name, "environment": environment, "settings": size, "rows": found}
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
    (tmp_path / "other.json").write_text("{}")
    lines = rows(script.tables(tmp_path))
    assert lines[0] == "**2 blocks of tiny, 1 x 64 tokens, forward + backward**"
    assert lines[2] == "| recipe | compiled ms | speedup | peak GiB | eager ms | speedup |"
    assert "| bf16 | 8.0 | 1.00 | 2.00 | 9.0 | 1.00 |" in lines
    assert "| torchao 1.0 x | 4.0 | 2.00 |  |  |  |" in lines
    assert "| layers | recipe | eager ms | speedup | GEMMs alone, ms |" in lines
    assert "| 1 x 2 x 3 | bf16 | 1.00 | 1.00 | 0.50 |" in lines
    assert "0.90 to 0.95 with one scale." in lines
    assert lines[-6:-4] == ["a GPU, torch 2.11. Results in", "[cast.json](cast.json), by"]
    assert lines[-3:] == ["```bash", "float8 bench", "```"]


def test_several_microbatches_are_named(script: ModuleType, tmp_path: Path) -> None:
    environment = {"device": "a GPU", "torch": "2.11", "command": "float8 bench"}
    size = {"model": "tiny", "blocks": 1, "batch": 1, "seq_len": 64, "microbatches": 4}
    found = [{"recipe": "tensorwise, cached weights", "mode": "eager", "ms": 9.0, "speedup": 1.0}]
    results = {"benchmark": "block", "environment": environment, "settings": size, "rows": found}
    (tmp_path / "block.json").write_text(json.dumps(results))
    lines = rows(script.tables(tmp_path))
    assert lines[0] == "**1 block of tiny, 1 x 64 tokens, forward + backward of 4 microbatches**"
    assert "| recipe | eager ms | speedup |" in lines  # no columns that nothing fills
    assert "| tensorwise, cached weights | 9.0 | 1.00 |" in lines


def test_sharded_training_is_shown_by_gather(script: ModuleType, tmp_path: Path) -> None:
    environment = {"device": "a GPU", "torch": "2.11", "command": "float8 bench", "torchao": "1.0"}
    size = {"model": "tiny", "blocks": 2, "batch": 1, "seq_len": 64, "ranks": 4}
    base = {"gather": "bf16", "ms": 8.0, "tokens_per_s": 32000.0, "speedup": 1.0}
    base |= {
        "gathered_mb": 2400.0,
        "reduce_scattered_mb": 1200.0,
        "exposed_ms": 1.25,
        "peak_gib": 3.0,
    }
    found = [
        {**base, "recipe": "bf16", "mode": "compiled"},
        {**base, "recipe": "torchao tensorwise", "mode": "eager", "gather": "float8"},
    ]
    results = {"benchmark": "fsdp", "environment": environment, "settings": size, "rows": found}
    (tmp_path / "fsdp.json").write_text(json.dumps(results))
    lines = rows(script.tables(tmp_path))
    assert lines[0].startswith("**2 blocks of tiny, FSDP2 on 4 ranks, 1 x 64 tokens each, forward")
    assert "| bf16 | bf16 | 8.0 | 32,000 | 1.00 | 3.60 | 1.2 | 3.00 |" in lines
    assert lines[5].startswith("| torchao 1.0 tensorwise, eager | float8 | 8.0 |")


def test_plain_models_are_shown_compiled_and_eager(script: ModuleType, tmp_path: Path) -> None:
    common = {"what": "8B stack", "ms": 8.0, "speedup": 1.0, "peak_gib": 2.0}
    found = [
        {**common, "recipe": "bf16", "mode": "compiled"},
        {**common, "recipe": "bf16", "mode": "eager", "ms": 9.0},
        {**common, "recipe": "tensorwise@torchao", "mode": "compiled", "ms": 7.0},
        {**common, "what": "another", "recipe": "bf16", "mode": "compiled", "ms": 1.0},
    ]
    environment = {"device": "a GPU", "torch": "2.11", "command": "python benchmarks/plain.py"}
    run = {"environment": {**environment, "commit": script.PLAIN_COMMIT}, "rows": found}
    other = {"environment": {**environment, "commit": f"{script.PLAIN_COMMIT}, changed"}}
    path = tmp_path / script.PLAIN
    path.write_text(json.dumps({"runs": [other, run]}))
    lines = rows(script.plain_stack(tmp_path))
    assert "| bf16 | 8.0 | 1.00 | 2.00 | 9.0 | 1.00 | 2.00 |" in lines
    assert "| torchao tensorwise | 7.0 | 1.00 | 2.00 |  |  |  |" in lines
    assert len(lines) == 11
    assert lines[5] == f"a GPU, torch 2.11, commit {script.PLAIN_COMMIT}. Results in"
    path.write_text(json.dumps({"runs": [other]}))
    with pytest.raises(ValueError, match="got 0 runs of commit"):
        script.plain_stack(tmp_path)


def test_long_commands_go_on_in_the_next_line(script: ModuleType) -> None:
    command = "float8 bench block " + " ".join(f"--option-{i} {i}" for i in range(30))
    lines = script.wrapped(command)
    assert len(lines) > 1
    assert max(map(len, lines)) <= script.WIDTH
    assert "".join(lines).replace("\\", "").split() == command.split()


def test_tables_fit_a_screen_of_100_columns(script: ModuleType) -> None:
    for write in script.SECTIONS.values():
        for line in write(script.RESULTS).splitlines():
            assert len(line) <= 120 if not line.startswith("|") else len(line) <= 100, line


def test_the_markers_must_be_there(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="page: expected the lines"):
        script.updated("no markers", "performance", "table")
