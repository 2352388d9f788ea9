"""What runs and comparisons show fits the terminal, however narrow it is."""

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from float8_lab.cli.compare import print_rows
from float8_lab.cli.progress import ConsoleProgress
from float8_lab.ranks import ALONE
from float8_lab.trainer.compare import RunRow, cells
from float8_lab.trainer.metrics import StepRecord


def row(recipe: str, status: str = "finished") -> RunRow:
    return RunRow(
        recipe=recipe,
        status=status,
        steps=9,
        train_loss=1.2345,
        val_loss=1.2346,
        val_gap_nats=-0.0123,
        val_gap_percent=-10.12,
        tokens_per_s=1_234_567.0,
        speedup=1.08,
        step_ms=1234.5,
        peak_memory_bytes=123_456 * 2**20,
        memory_note="",
        parameters=10,
        metrics="",
    )


@pytest.mark.parametrize(("width", "tables"), [(120, 1), (80, 1), (50, 3)])
def test_the_table_of_a_comparison_fits_with_all_its_numbers(width: int, tables: int) -> None:
    rows = [row("high_precision", "interrupted"), row("tensorwise"), row("rowwise_with_gw_hp")]
    file = io.StringIO()
    print_rows(Console(file=file, width=width), rows)
    shown = file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    assert shown.count("losses in nats per byte") == tables
    for one in rows:
        for text in list(cells(one).values())[1:]:
            assert shown.split().count(text) == len(rows)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_the_bar_fits_and_shows_step_and_loss(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    config: Any = SimpleNamespace(
        steps=100_000, recipe="high_precision", model="tiny", dtype="float32", compile=False,
        device="cpu", tokens_per_step=64, model_config=lambda: SimpleNamespace(num_parameters=10),
    )  # fmt: skip
    corpus = SimpleNamespace(name="text", train=b"", train_files=1)
    run: Any = SimpleNamespace(config=config, corpus=corpus, conversion="", step=0, ranks=ALONE)
    progress = ConsoleProgress(console)
    progress.on_start(run)
    progress.on_step(50_000)
    progress.on_records([StepRecord(50_000, 1.25, 1.0, 1e-3, 0.1, 65_536, True, 12 * 2**30)])
    assert progress._bar is not None
    progress._bar.refresh()
    progress.on_end("finished", 50_000)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", file.getvalue()).replace("\r", "\n")
    bars = [line for line in shown.split("\n") if "loss 1.2500" in line]
    assert bars
    for line in bars:
        assert len(line) <= width
        assert " 50000/100000 " in line
        assert "…" not in line
        assert ("12.00 GiB" in line) == (width == 120)
