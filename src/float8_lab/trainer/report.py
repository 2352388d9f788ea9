"""The outcome of a comparison: rows with gaps to high precision, as JSON and as Markdown."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from float8_lab.trainer.metrics import FINISHED, Summary


@dataclass(frozen=True, kw_only=True)
class RunRow(Summary):
    """One run of a comparison; None stands for what is not known. Gaps are to high precision."""

    recipe: str
    status: str  # `"finished"`, `"interrupted"`, `"stopped"` or `"failed"`
    parameters: int  # how many are trained
    metrics: str  # the run's record, relative to the report
    error: str | None = None  # why it failed
    train_gap_nats: float | None = None
    val_gap_nats: float | None = None
    val_gap_percent: float | None = None
    speedup: float | None = None


def with_gaps(row: RunRow, base: RunRow) -> RunRow:
    """`row` with what it differs by from `base`, the row of high precision.

    Gaps stay None unless both runs finished: losses after different numbers of steps say nothing
    about a recipe.
    """
    found: dict[str, Any] = {}
    if row.tokens_per_s and base.tokens_per_s:
        found["speedup"] = row.tokens_per_s / base.tokens_per_s
    if row.status == base.status == FINISHED:
        if row.train_loss is not None and base.train_loss is not None:
            found["train_gap_nats"] = row.train_loss - base.train_loss
        if row.val_loss is not None and base.val_loss:
            found["val_gap_nats"] = row.val_loss - base.val_loss
            found["val_gap_percent"] = 100 * found["val_gap_nats"] / base.val_loss
    return replace(row, **found)


def write_report(
    folder: Path,
    rows: list[RunRow],
    *,
    environment: dict[str, Any],
    settings: dict[str, Any],
    corpus: dict[str, Any],
) -> Path:
    """Write `report.json`, whose path is returned, and `report.md`; each is replaced in one go."""
    content = {
        "runs": [{"recipe": row.recipe, "status": row.status, **asdict(row)} for row in rows],
        "environment": environment,
        "settings": settings,
        "corpus": corpus,
    }
    _replace(folder / "report.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    _replace(folder / "report.md", _markdown(rows, environment, corpus))
    return folder / "report.json"


def cells(row: RunRow) -> dict[str, str]:
    """A row as text by column; "-" for what is not known."""

    def show(value: float | None, form: str, unit: str = "") -> str:
        return "-" if value is None else format(value, form) + unit

    memory = row.peak_memory_bytes
    return {
        "recipe": row.recipe if row.status == FINISHED else f"{row.recipe} ({row.status})",
        "train loss": show(row.train_loss, ".4f"),
        "val loss": show(row.val_loss, ".4f"),
        "gap (nats)": show(row.val_gap_nats, "+.4f"),
        "gap (%)": show(row.val_gap_percent, "+.2f"),
        "tokens/s": show(row.tokens_per_s, ",.0f"),
        "speed-up": show(row.speedup, ".2f", "x"),
        "step (ms)": show(row.step_ms, ".1f"),
        "peak MiB": show(None if memory is None else memory / 2**20, ",.0f"),
    }


def _markdown(rows: list[RunRow], environment: dict[str, Any], corpus: dict[str, Any]) -> str:
    table = [cells(row) for row in rows]
    lines = ["| " + " | ".join(table[0]) + " |", "|---" + "|---:" * (len(table[0]) - 1) + "|"]
    lines += ["| " + " | ".join(row.values()) + " |" for row in table]
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
