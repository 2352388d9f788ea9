"""Shared by commands that measure: where they run, what is compared, what they leave behind."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from float8_lab.bench.results import check_output, write_results
from float8_lab.bench.step import CHECKPOINTING, IN_FLOAT8, Row
from float8_lab.bench.variants import MODES, PEERS, peer_version
from float8_lab.cli.options import Words, one_of
from float8_lab.cli.progress import make_console
from float8_lab.cli.table import print_table
from float8_lab.device import float8_device
from float8_lab.errors import ConfigError
from float8_lab.trainer.environment import describe_environment

Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write results: a .json file.")]
Checkpointing = Annotated[
    Words,
    f"Of blocks: off, {IN_FLOAT8} (kept so), {', '.join(CHECKPOINTING)}; several: with commas.",
]
Peers = Annotated[Words, f"Also {', '.join(PEERS)}, if it is installed."]
Recipes = Annotated[Words, "Several: with commas; else all."]


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

    rounds: Annotated[int, "Timed steps in each of two passes; medians are reported."] = 10


@dataclass
class RanksRun(Run):
    """Where ranks run, and how often."""

    device: Annotated[str, "cuda, or cpu to try it without a GPU."] = "cuda"
    ranks: Annotated[int | None, "Processes, each with a GPU; else all GPUs, or 2 on a CPU."] = None


@dataclass
class Compared:
    """Options of what is compared with bf16."""

    recipe: Annotated[
        Words,
        "Several: with commas; else tensorwise,delayed. Or MODULE:NAME, a Float8LinearConfig of "
        "yours. Behind a +: its switches, as in tensorwise+round_scales_to_power_of_2; fast_accum "
        "for all GEMMs; held and only for float8_weights; for train head: the head, if it gains.",
    ] = None
    mode: Annotated[str, f"{', '.join(MODES)}."] = "both"
    peers: Peers = None

    def chosen(
        self, checkpointing: Words = None, *, all_layers: bool = True, head: bool = False
    ) -> dict[str, Any]:
        """Return the arguments of `make_variants`, for a model with a `head` or without one."""
        if not head and any("head" in recipe.split("+") for recipe in self.recipe or []):
            raise ConfigError("recipe: got +head, which only train takes: no other has a head")
        choices = {"off": "", **{name: name for name in (IN_FLOAT8, *CHECKPOINTING)}}
        chosen: dict[str, Any] = {"recipes": self.recipe or ["tensorwise", "delayed"]}
        chosen |= {"modes": one_of("mode", self.mode, MODES), "peers": self.peers or []}
        blocks = [one_of("checkpointing", x, choices) for x in checkpointing or ["off"]]
        return chosen | {"all_layers": all_layers, "checkpointing": blocks}


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
        lines = ["{device}, torch {torch}".format(**about)] * tell
        lines += [f"{peer} is not installed: left out" for peer in versions if not versions[peer]]
        for line in lines:
            self.console.print(line)

    def collect(self, groups: Iterable[list[Row]], total: int) -> list[Row]:
        """Return the last of `groups`, each of which has all rows so far; a line counts them."""
        rows: list[Row] = []
        for number, rows in enumerate(groups, 1):
            if rows and self._output is not None:  # so that nothing is lost if it is stopped
                write_results(self._output, {**self._about, "rows": rows})
            self.console.print(f"  {number}/{total}")
        return rows

    def finish(self, title: str, rows: list[Row], **more: Any) -> None:
        """Print a table, or one of each `part`; write the file."""
        for row in rows:
            if row.get("left_out"):
                name = ", ".join(filter(None, (row["recipe"], row["mode"])))
                self.console.print(f"{name} is left out: {row['left_out']}")
        for part in dict.fromkeys(row.get("part") for row in rows):
            of_part = [row for row in rows if row.get("part") == part]
            print_table(self.console, part or title, of_part)
        if self._output is not None:
            write_results(self._output, {**self._about, **more, "rows": rows})
            self.console.print(f"results: {self._output}")
