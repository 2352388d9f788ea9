"""One `float8 bench` command on the terminal: its bar, its table, its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from float8_lab.bench.devices import bench_device
from float8_lab.bench.peers import peer_version
from float8_lab.bench.plot import plot_speedups
from float8_lab.bench.results import Results, check_output
from float8_lab.cli.bench_tables import Column, print_table
from float8_lab.cli.progress import make_console
from float8_lab.trainer.environment import describe_environment

Rows = list[dict[str, Any]]


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
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        hidden = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as bar:
            task = bar.add_task(self.name, total=total)
            for number, group in enumerate(groups, 1):
                rows += group
                bar.advance(task)
                if hidden:
                    self.console.print(f"  {number}/{total}")
        return rows

    def finish(
        self,
        title: str,
        columns: Sequence[Column],
        rows: Rows,
        plot: Path | None = None,
        **extra: Any,
    ) -> None:
        """Print the table, write the files."""
        if self.device.type == "cpu":
            title += " (host times)"
        print_table(self.console, title, columns, rows)
        if self.output is not None:
            environment = self._environment()
            Results(self.name, environment, self.settings, rows, extra).write(self.output)
            self.console.print(f"results: {self.output}")
        if plot is not None:
            plot_speedups(
                rows, f"{title}\nspeedup over bf16, {self._environment()['device']}", plot
            )
            self.console.print(f"plot: {plot}")

    def find_peers(self, peers: Sequence[str]) -> list[str]:
        """Those that are installed; says which are not."""
        found = [peer for peer in peers if peer_version(peer) is not None]
        for peer in peers:
            if peer not in found:
                self.console.print(f"{peer} is not installed: left out")
        return found

    def _environment(self) -> dict[str, Any]:
        environment = describe_environment(self.device)
        for peer in self.settings.get("peers", []):
            environment[peer] = peer_version(peer)
        return environment
