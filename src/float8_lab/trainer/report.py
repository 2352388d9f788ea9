"""The outcome of a comparison: rows with gaps to high precision, as JSON and as Markdown."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from float8_lab.trainer.metrics import FINISHED, Summary


@dataclass(frozen=True)
class RunRow:
    """One run of a comparison; None stands for what is not known.

    Attributes:
        recipe: The recipe's name.
        status: `"finished"`, `"interrupted"`, `"stopped"` or `"failed"`.
        train_loss: Mean over the last tenth of the steps (at most 100), nats per byte.
        val_loss: At the end, nats per byte.
        train_gap_nats: Training loss minus that of high precision.
        val_gap_nats: Validation loss minus that of high precision.
        val_gap_percent: The same in percent of high precision's.
        tokens_per_s: Median over the steps after compilation and warm-up.
        speedup: Throughput over that of high precision.
        step_ms: Median over the same steps.
        peak_memory_bytes: See `memory_note`.
        memory_note: What the peak memory means, or why there is none.
        steps: Optimizer steps done.
        parameters: Number of trained parameters.
        metrics: The run's record, relative to the report.
        error: Why the run failed.
    """

    recipe: str
    status: str
    train_loss: float | None = None
    val_loss: float | None = None
    train_gap_nats: float | None = None
    val_gap_nats: float | None = None
    val_gap_percent: float | None = None
    tokens_per_s: float | None = None
    speedup: float | None = None
    step_ms: float | None = None
    peak_memory_bytes: int | None = None
    memory_note: str = ""
    steps: int = 0
    parameters: int | None = None
    metrics: str | None = None
    error: str | None = None


def make_row(
    recipe: str, status: str, summary: Summary, reference: RunRow | None, **about: Any
) -> RunRow:
    """Turn a run's summary into a row.

    Gaps stay None unless both runs finished: losses after different numbers of steps say nothing
    about a recipe.

    Args:
        recipe: The recipe's name.
        status: How the run ended.
        summary: Its numbers.
        reference: The row of high precision, None if this is it.
        **about: The other fields of the row.
    """
    row = RunRow(
        recipe,
        status,
        train_loss=_finite(summary.train_loss),
        val_loss=_finite(summary.val_loss),
        tokens_per_s=summary.tokens_per_s,
        step_ms=None if summary.step_seconds is None else 1e3 * summary.step_seconds,
        peak_memory_bytes=summary.peak_memory_bytes,
        steps=summary.steps,
        **about,
    )
    base = reference or row
    if row.tokens_per_s and base.tokens_per_s:
        row = replace(row, speedup=row.tokens_per_s / base.tokens_per_s)
    if row.status == base.status == FINISHED:
        if row.train_loss is not None and base.train_loss is not None:
            row = replace(row, train_gap_nats=row.train_loss - base.train_loss)
        if row.val_loss is not None and base.val_loss:
            gap = row.val_loss - base.val_loss
            row = replace(row, val_gap_nats=gap, val_gap_percent=100 * gap / base.val_loss)
    return row


def _finite(value: float | None) -> float | None:
    """JSON has no NaN, and a diverged run has no loss to compare."""
    return value if value is not None and math.isfinite(value) else None


def write_report(
    folder: Path,
    rows: list[RunRow],
    *,
    environment: dict[str, Any],
    settings: dict[str, Any],
    corpus: dict[str, Any],
) -> Path:
    """Write `report.json` and `report.md`; a report that was there is replaced in one go.

    Returns:
        The path of `report.json`.
    """
    content = {
        "runs": [asdict(row) for row in rows],
        "environment": environment,
        "settings": settings,
        "corpus": corpus,
    }
    _replace(folder / "report.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    _replace(folder / "report.md", _markdown(rows, environment, corpus))
    return folder / "report.json"


HEADINGS = (
    "recipe",
    "train loss",
    "val loss",
    "gap (nats)",
    "gap (%)",
    "tokens/s",
    "speed-up",
    "step (ms)",
    "peak MiB",
)


def cells(row: RunRow) -> tuple[str, ...]:
    """A row as text, in the order of `HEADINGS`; "-" for what is not known."""

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    memory = row.peak_memory_bytes
    return (
        row.recipe if row.status == FINISHED else f"{row.recipe} ({row.status})",
        show(row.train_loss, ".4f"),
        show(row.val_loss, ".4f"),
        show(row.val_gap_nats, "+.4f"),
        show(row.val_gap_percent, "+.2f"),
        show(row.tokens_per_s, ",.0f"),
        show(row.speedup, ".2f") + ("" if row.speedup is None else "x"),
        show(row.step_ms, ".1f"),
        "-" if memory is None else f"{memory / 2**20:,.0f}",
    )


def _markdown(rows: list[RunRow], environment: dict[str, Any], corpus: dict[str, Any]) -> str:
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---" + "|---:" * (len(HEADINGS) - 1) + "|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    lines += ["", "Losses in nats per byte; gaps in validation loss to the first row."]
    lines += [f"{row.recipe} failed: {row.error}" for row in rows if row.error]
    lines += ["", f"- data: {corpus['name']}, {corpus['train_bytes']:,} training bytes"]
    lines += [f"- {name}: {value}" for name, value in environment.items() if value is not None]
    return "\n".join(lines) + "\n"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.unfinished")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
