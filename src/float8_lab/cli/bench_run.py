"""One `float8 bench` command on the terminal: its options, its bar, its table, its files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from float8_lab.bench.results import check_output, plot_speedups, write_results
from float8_lab.bench.shapes import SHAPE_SETS
from float8_lab.bench.timing import bench_device
from float8_lab.bench.variants import MODES, peer_version
from float8_lab.cli.progress import make_console
from float8_lab.models.presets import PRESETS
from float8_lab.trainer.environment import describe_environment

Rows = list[dict[str, Any]]

ShapeSets = Annotated[
    list[str] | None,
    typer.Option("--shapes", help=f"Of {', '.join(SHAPE_SETS)}; several: with commas."),
]
Mkn = Annotated[
    list[str] | None,
    typer.Option("--mkn", help="A shape as M,K,N: tokens, in and out features; repeatable."),
]
Device = Annotated[str, typer.Option(help="cuda, cuda:N, or cpu to try it with host times.")]
Rounds = Annotated[int, typer.Option(min=1, help="Samples per variant; medians are reported.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write results: .json or .csv.")
]
Plot = Annotated[Path | None, typer.Option(help="Write a heat map of speedups over shapes.")]
Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        help="Several: with commas. Switches of Float8LinearConfig behind a +, as in "
        "tensorwise+round_scales_to_power_of_2; +fast_accum for all GEMMs.",
        show_default="tensorwise,delayed",
    ),
]
Mode = Annotated[str, typer.Option(help=f"{', '.join(MODES)}.")]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peers", help="Also measure torchao, te (TransformerEngine) or torchao,te."),
]
Model = Annotated[str, typer.Option(help=f"Shape of the blocks: {', '.join(PRESETS)}.")]
Blocks = Annotated[int, typer.Option(min=1, help="How many blocks.")]
SeqLen = Annotated[int, typer.Option(min=1, help="Tokens per sequence.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences.")]

# What is shown of a row, in this order. A heading is the key itself, with exceptions.
_NAMES = "pass gemm M K N R C case count layers variant kind recipe mode gather"
_NUMBERS = (
    "calls us share ms bf16_ms float8_ms tokens_per_s tflops gb_per_s of_copy speedup floor_ms "
    "gathered_mb reduce_scattered_mb all_reduced_kb exposed_ms saved_mib peak_mib peak_gib "
    "sqnr_db same_bits fate"
)
_HEADINGS = {
    "gemm": "GEMM",
    "R": "rows",
    "C": "columns",
    "fate": "",
    "tokens_per_s": "tokens/s",
    "tflops": "TFLOP/s",
    "gb_per_s": "GB/s",
    "of_copy": "of copy",
    "floor_ms": "float8\nGEMMs\nalone",
    "gathered_mb": "gathered\nMB",
    "reduce_scattered_mb": "reduce-\nscattered\nMB",
    "all_reduced_kb": "all-\nreduced\nkB",
    "exposed_ms": "exposed\ncomm ms",
    "saved_mib": "saved\nMiB",
    "peak_mib": "peak\nMiB",
    "peak_gib": "peak\nGiB",
    "sqnr_db": "SQNR\ndB",
    "same_bits": "bits of\n16-bit\ngather",
}
_FORMATS = {"speedup": ".2f", "sqnr_db": ".1f", "same_bits": ".0%"}
_FORMATS |= {"share": ".1%", "of_copy": ".1%"}


def words(values: Sequence[str] | None) -> list[str]:
    """Words of options that may be repeated or hold several words with commas between."""
    return [word for value in values or [] for word in value.split(",") if word]


def choices(recipe: Sequence[str] | None, mode: str, peers: Sequence[str] | None) -> dict[str, Any]:
    """The settings `recipes`, `modes` and `peers`; a `ValueError` names the modes there are."""
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, expected one of {', '.join(MODES)}")
    recipes = words(recipe) or ["tensorwise", "delayed"]
    return {"recipes": recipes, "modes": MODES[mode], "peers": words(peers)}


@dataclasses.dataclass
class Bench:
    """One benchmark on the terminal: what it prints and what it leaves behind."""

    name: str
    device: torch.device
    settings: dict[str, Any]
    output: Path | None
    console: Console

    @classmethod
    def start(cls, name: str, device_name: str, output: Path | None, **settings: Any) -> Bench:
        """Refuse what cannot work before anything is measured, and say where this runs."""
        device = bench_device(device_name)
        if output is not None:
            check_output(output)
        torch.manual_seed(0)
        bench = cls(name, device, settings, output, make_console())
        environment = bench._environment()
        bench.console.print(f"{environment['device']}, torch {environment['torch']}")
        return bench

    def collect(self, groups: Iterable[Rows], total: int) -> Rows:
        """All rows; a bar moves with each group where there is a terminal, else a line says so."""
        rows: Rows = []
        columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        hidden = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as bar:
            task = bar.add_task(self.name, total=total)
            for number, group in enumerate(groups, 1):
                rows += group
                bar.advance(task)
                if hidden:
                    self.console.print(f"  {number}/{total}")
        return rows

    def finish(self, title: str, rows: Rows, plot: Path | None = None, **extra: Any) -> None:
        """Print the table, write the files."""
        if self.device.type == "cpu":
            title += " (host times)"
        print_table(self.console, title, rows)
        environment = self._environment()
        if self.output is not None:
            write_results(self.output, self.name, rows, environment, self.settings, extra)
            self.console.print(f"results: {self.output}")
        if plot is not None:
            plot_speedups(rows, f"{title}\nspeedup over bf16, {environment['device']}", plot)
            self.console.print(f"plot: {plot}")

    def find_peers(self) -> list[str]:
        """Those in the settings that are installed; says which are not."""
        versions = {peer: peer_version(peer) for peer in self.settings["peers"]}
        for peer, version in versions.items():
            if version is None:
                self.console.print(f"{peer} is not installed: left out")
        return [peer for peer, version in versions.items() if version is not None]

    def _environment(self) -> dict[str, Any]:
        peers = self.settings.get("peers", [])
        return describe_environment(self.device) | {peer: peer_version(peer) for peer in peers}


def print_table(console: Console, title: str, rows: Rows) -> None:
    """Print what is known of `rows`; columns that no row has a value for are left out.

    As many tables, one below the other, as it takes to print numbers whole: each has the names.
    """
    known = {key for row in rows for key, value in row.items() if value is not None}
    names = [key for key in _NAMES.split() if key in known]
    numbers = [key for key in _NUMBERS.split() if key in known]
    while True:
        narrower = ((0, count) for count in range(len(numbers), 0, -1))
        for padding, shown in [(1, len(numbers)), *narrower]:
            table = _table(title, rows, names + numbers[:shown], padding)
            needed = table.__rich_measure__(console, console.options)
            if (needed.maximum if padding else needed.minimum) <= console.width:
                break
        console.print(table)
        numbers = numbers[shown:]
        if not numbers:
            return


def _table(title: str, rows: Rows, keys: Sequence[str], padding: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, padding))
    columns = [[_cell(row.get(key), _FORMATS.get(key)) for row in rows] for key in keys]
    for key, cells in zip(keys, columns, strict=True):
        number = any(isinstance(row.get(key), (int, float)) for row in rows)
        heading = _HEADINGS.get(key, key.replace("_", "\n"))
        words = [word for text in (heading, *cells) for word in text.split()]
        table.add_column(
            heading,
            justify="right" if number else "left",
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
