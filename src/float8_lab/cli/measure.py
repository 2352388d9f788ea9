"""What commands that measure share: where they run, what is compared, what they leave behind."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from float8_lab.bench.results import check_output, write_results
from float8_lab.bench.step import KEPT, Row
from float8_lab.bench.variants import MODES, PEERS, peer_version
from float8_lab.cli.options import Words, split
from float8_lab.cli.progress import make_console
from float8_lab.cli.table import print_table
from float8_lab.device import float8_device
from float8_lab.errors import ConfigError
from float8_lab.trainer.environment import describe_environment

Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write results: a .json file.")]
Keep = Annotated[Words, f"Checkpoint blocks and keep of them: {', '.join(KEPT)}; with commas."]
Peers = Annotated[Words, f"Also {', '.join(PEERS)}, if it is installed."]


@dataclass
class Place:
    """Where a measurement runs, and where its results go."""

    device: Annotated[str, "cuda, cuda:N, or cpu to try it without a GPU."] = "cuda"
    output: Output = None

    def checked(self) -> torch.device:
        """The device; refuses what cannot work before anything is measured."""
        check_output(self.output)
        return float8_device(self.device)


@dataclass
class Run(Place):
    """Options of a benchmark that takes samples."""

    rounds: Annotated[int, "Samples per variant; medians are reported."] = 15


class Bench:
    """One measurement on the terminal: where it runs, what it prints and what it leaves behind."""

    def __init__(self, name: str, where: Place, *, tell: bool = True, **settings: Any) -> None:
        self.device = where.checked()
        torch.manual_seed(0)
        self.console = make_console()
        self._output = where.output
        if isinstance(where, Run):
            settings["rounds"] = where.rounds
        versions = {peer: peer_version(peer) for peer in settings.get("peers", [])}
        about = describe_environment(self.device) | versions
        self._about = {"benchmark": name, "environment": about, "settings": settings}
        if tell:
            self.console.print("{device}, torch {torch}".format(**about))
        for peer, version in versions.items():
            if version is None:
                self.console.print(f"{peer} is not installed: left out")

    def collect(
        self,
        groups: Iterable[list[Row]],
        total: int,
        seconds: float | None = None,
        growing: bool = False,
    ) -> list[Row]:
        """All rows, or those of the first `seconds`; a line says how many groups are there.

        Groups follow each other, or, `growing`, each has all rows so far.
        """
        rows: list[Row] = []
        began = time.monotonic()
        for number, group in enumerate(groups, 1):
            rows = group if growing else rows + group
            if group and self._output is not None:  # so that nothing is lost if it is stopped
                write_results(self._output, {**self._about, "rows": rows})
            self.console.print(f"  {number}/{total}")
            if seconds is not None and time.monotonic() > began + seconds:
                break
        return rows

    def finish(self, title: str, rows: list[Row]) -> dict[str, Any]:
        """Print a table, or one of each `part`; write the file; returns what it would have."""
        for row in rows:
            if row.get("left_out"):
                name = ", ".join(filter(None, (row["recipe"], row["mode"])))
                self.console.print(f"{name} is left out: {row['left_out']}")
        for part in dict.fromkeys(row.get("part") for row in rows):
            of_part = [row for row in rows if row.get("part") == part]
            print_table(self.console, part or title, of_part)
        results = {**self._about, "rows": rows}
        if self._output is not None:
            write_results(self._output, results)
            self.console.print(f"results: {self._output}")
        return results


@dataclass
class Compared:
    """Options of what is compared with bf16."""

    recipe: Annotated[
        Words,
        typer.Option(
            help="Several: with commas. Behind a +: switches of Float8LinearConfig, as in "
            "tensorwise+round_scales_to_power_of_2; fast_accum for all GEMMs; held and only for "
            "float8_weights.",
            show_default="tensorwise,delayed",
            callback=split,
        ),
    ] = None
    mode: Annotated[str, f"{', '.join(MODES)}."] = "both"
    peers: Peers = None

    def chosen(self, keep: Words = None, *, all_layers: bool = True) -> dict[str, Any]:
        """Return the arguments of `make_variants`."""
        if self.mode not in MODES:
            raise ConfigError(f"mode: got {self.mode!r}, expected one of {', '.join(MODES)}")
        kept, recipes = keep or [], self.recipe or ["tensorwise", "delayed"]
        if unknown := {*kept} - {*KEPT}:
            raise ConfigError(f"keep: got {min(unknown)!r}, expected some of {', '.join(KEPT)}")
        modes, peers = MODES[self.mode], self.peers or []
        of_layers = {"keep": kept, "all_layers": all_layers}
        return {"recipes": recipes, "modes": modes, "peers": peers, **of_layers}


def draw(how: str, results: dict[str, Any] | Path, path: Path | None) -> None:
    """Write a picture of results, or of their file; `how` is the module that draws it."""
    if path is None:
        raise ConfigError("results: got a file to draw, expected --plot FILE.png with it")
    if isinstance(results, Path):
        results = json.loads(results.read_text())
    import_module(f"float8_lab.bench.{how}").plot_results(results, path)  # has matplotlib
    typer.echo(f"plot: {path}")
