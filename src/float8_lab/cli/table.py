"""Rows of results as tables that fit the terminal, however narrow it is."""

import math
import re
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]

# What is shown of a row, in this order. A heading is the key itself, its words below each other.
_NAMES = "pass gemm M K N R C case count layers variant kind recipe mode gather keep"
_TEXT = "pass gemm case layers variant kind recipe mode gather keep fate"
_NUMBERS = (
    "calls us share ms bf16_ms float8_ms tokens_per_s tflops gb_per_s of_copy speedup floor_ms "
    "gathered_mb reduce_scattered_mb all_reduced_kb exposed_ms saved_mib peak_gib "
    "sqnr_db more_noise_db same_scales same_bits fate "
    "sqnr_output sqnr_grad_input sqnr_grad_weight "
    "even_output even_grad_input even_grad_weight "
    "underflow_input underflow_weight underflow_grad_output "
    "saturation_input saturation_weight saturation_grad_output"
)
_HEADINGS = {
    "R": "rows",
    "C": "columns",
    "tokens_per_s": "tokens/s",
    "tflops": "TFLOP/s",
    "gb_per_s": "GB/s",
    "floor_ms": "float8\nGEMMs\nalone",
    "same_bits": "bits of\n16-bit\ngather",
    "more_noise_db": "dB\nlost",
    "exposed_ms": "exposed\ncomm ms",
    "keep": "kept",
    "fate": "",
}
_WORDS = {"gemm": "GEMM", "sqnr": "SQNR", "db": "dB", "kb": "kB", "mb": "MB", "mib": "MiB"}
_WORDS |= {"gib": "GiB", "underflow": "under-\nflow", "saturation": "satu-\nrated"}
_FORMATS = {"speedup": ".2f", "sqnr_db": ".1f", "same_bits": ".0%", "share": ".1%"}
_FORMATS |= {"of_copy": ".1%", "more_noise_db": ".2f", "same_scales": ".0%"}
_FORMATS |= {k: ".1f" for k in _NUMBERS.split() if k.startswith(("sqnr_", "even_"))}
_FORMATS |= {k: ".1g" for k in _NUMBERS.split() if k.startswith(("underflow_", "saturation_"))}


def print_table(
    console: Console, title: str, rows: Rows, numbers: Sequence[str] = _NUMBERS.split()
) -> None:
    """Print what is known of `rows`; columns that no row has a value for are left out.

    As many tables, one below the other, as it takes to print numbers whole: each has the names.
    """
    known = {key for row in rows for key, value in row.items() if value is not None}
    names = [key for key in _NAMES.split() if key in known]
    numbers = [key for key in numbers if key in known]
    while numbers:
        for count in range(len(numbers), 0, -1):
            keys = numbers[:count]
            some = [row for row in rows if any(row.get(key) is not None for key in keys)]
            table = _table(title, some, names + keys)
            if table.__rich_measure__(console, console.options).minimum <= console.width:
                break
        console.print(table)
        numbers = numbers[count:]


def _table(title: str, rows: Rows, keys: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=0)
    columns = [[_cell(row.get(key), _FORMATS.get(key)) for row in rows] for key in keys]
    for key, cells in zip(keys, columns, strict=True):
        default = "\n".join(_WORDS.get(word, word) for word in re.split("[_ ]", key))
        heading = _HEADINGS.get(key, default)
        words = [word for text in (heading, *cells) for word in text.split()]
        table.add_column(
            heading,
            justify="left" if key in _TEXT.split() else "right",
            no_wrap=not any(" " in cell for cell in cells),
            min_width=max(map(len, words), default=0),
        )
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    return table


def _cell(value: Any, form: str | None) -> str:
    """Numbers that have no format of their own have four digits."""
    if not isinstance(value, (int, float)):
        return value or ""
    if isinstance(value, float) and form is None:
        digits = math.floor(math.log10(abs(value))) if value else 0
        form = f",.{max(0, 3 - digits)}f"
    return format(value, form or "")
