"""Rows of results as tables on the terminal."""

import math
import re
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]

# What is shown of a row, in this order. A heading is the key itself, its words below each other.
_NAMES = "what width M K N count layers recipe mode gather checkpointing"
_TEXT = "what layers recipe mode gather checkpointing fate"
_NUMBERS = (
    "train_loss gemms_ms attention_ms casts_ms else_ms launches ms bf16_ms float8_ms "
    "tokens_per_s tokens_per_s_per_gpu speedup peak_gib first_step_s drift_percent sqnr_db loss "
    "val_loss val_gap_nats val_gap_percent gap_error_percent noise_percent fate"
)
_WORDS = {"sqnr": "SQNR", "db": "dB", "gemms": "GEMMs", "gib": "GiB"}
_HEADINGS = {"tokens_per_s": "tokens/s", "tokens_per_s_per_gpu": "tokens/s\nper GPU", "fate": ""}
_HEADINGS |= {"drift_percent": "drift\n%", "what": "", "checkpointing": "check-\npointing"}
_FORMATS = {"speedup": ".2f", "sqnr_db": ".1f", "first_step_s": ".1f", "drift_percent": ".1f"}
_FORMATS |= {"train_loss": ".4f", "val_loss": ".4f", "val_gap_nats": "+.4f"}
_FORMATS |= {"val_gap_percent": "+.2f", "gap_error_percent": ".2f", "noise_percent": ".2f"}


def print_table(console: Console, title: str, rows: Rows) -> None:
    """Print what is known of `rows`; columns that no row has a value for are left out."""
    filled = {key for row in rows for key, value in row.items() if value is not None}
    keys = [key for key in f"{_NAMES} {_NUMBERS}".split() if key in filled]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="", padding=0)
    for key in keys:
        default = "\n".join(_WORDS.get(word, word) for word in re.split("[_ ]", key))
        justify: Any = "left" if key in _TEXT.split() else "right"
        table.add_column(_HEADINGS.get(key, default), justify=justify, overflow="fold")
    columns = [_cells([row.get(key) for row in rows], _FORMATS.get(key)) for key in keys]
    for cells in zip(*columns, strict=True):
        table.add_row(*cells)
    with console.capture() as shown:
        console.print(table)
    console.print("\n".join([title, "", *map(str.rstrip, shown.get().splitlines()), ""]))


def _cells(values: list[Any], form: str | None) -> list[str]:
    """Numbers that have no format of their own: four digits of the largest in their column."""
    largest = max((abs(x) for x in values if isinstance(x, float)), default=0.0)
    form = form or f",.{max(0, 3 - math.floor(math.log10(largest or 1)))}f"
    numbers = {float: form, int: ""}
    return [format(x, numbers[type(x)]) if type(x) in numbers else x or "" for x in values]
