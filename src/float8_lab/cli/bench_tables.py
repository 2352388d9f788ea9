"""The tables that `float8 bench` and `float8 plan` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

_LOG_WIDTH = 180


class Column(NamedTuple):
    """A column of a table of rows: which key, under which heading, in which format."""

    key: str
    heading: str
    format: str = ""


SHAPE = [Column("M", "tokens"), Column("K", "in"), Column("N", "out")]

MATMUL = [
    Column("gemm", "GEMM"),
    Column("M", "M"),
    Column("K", "K"),
    Column("N", "N"),
    Column("variant", "variant"),
    Column("ms", "ms", ".4f"),
    Column("tflops", "TFLOP/s", ".1f"),
    Column("speedup", "speedup", ".2f"),
    Column("sqnr_db", "SQNR dB", ".1f"),
]
LINEAR = [
    *SHAPE,
    Column("recipe", "recipe"),
    Column("mode", "mode"),
    Column("ms", "ms", ".3f"),
    Column("speedup", "speedup", ".2f"),
    Column("floor_ms", "float8 GEMMs alone", ".3f"),
    Column("saved_mib", "saved MiB", ",.1f"),
    Column("peak_mib", "peak MiB", ",.0f"),
    Column("sqnr_db", "SQNR dB", ".1f"),
]
CAST = [
    Column("R", "rows"),
    Column("C", "columns"),
    Column("case", "case"),
    Column("us", "us", ",.1f"),
    Column("gb_per_s", "GB/s", ",.0f"),
    Column("of_copy", "of copy", ".1%"),
]
BLOCK = [
    Column("recipe", "recipe"),
    Column("mode", "mode"),
    Column("ms", "ms", ",.2f"),
    Column("speedup", "speedup", ".2f"),
    Column("peak_gib", "peak GiB", ".2f"),
    Column("sqnr_db", "SQNR dB", ".1f"),
]
FSDP = [
    Column("recipe", "recipe"),
    Column("mode", "mode"),
    Column("gather", "gather"),
    Column("ms", "ms", ",.2f"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("speedup", "speedup", ".2f"),
    Column("gathered_mb", "gathered MB", ",.1f"),
    Column("reduce_scattered_mb", "reduce-scattered MB", ",.1f"),
    Column("all_reduced_kb", "all-reduced kB", ",.2f"),
    Column("exposed_ms", "exposed comm ms", ",.2f"),
    Column("peak_gib", "peak GiB", ".2f"),
    Column("sqnr_db", "SQNR dB", ".1f"),
    Column("same_bits", "bits of 16-bit gather", ".0%"),
]
PROFILE = [
    Column("pass", "pass"),
    Column("kind", "kind"),
    Column("calls", "calls"),
    Column("us", "us", ",.0f"),
    Column("share", "share", ".1%"),
]
PLAN = [
    *SHAPE,
    Column("count", "count"),
    Column("layers", "layers"),
    Column("bf16_ms", "bf16 ms", ".3f"),
    Column("float8_ms", "float8 ms", ".3f"),
    Column("speedup", "speedup", ".2f"),
    Column("fate", ""),
]


def print_table(
    console: Console, title: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]]
) -> None:
    """Print a table of `rows`; columns that no row has a value for are left out."""
    if not console.is_terminal:  # a log is as wide as it has to be
        console.width = max(console.width, _LOG_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    shown = [c for c in columns if any(row.get(c.key) is not None for row in rows)]
    for column in shown:
        numbers = all(isinstance(row.get(column.key), (int, float, type(None))) for row in rows)
        right = numbers or column in SHAPE
        table.add_column(column.heading, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row.get(c.key), c.format) for c in shown))
    console.print(table)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, form)
