"""One `float8 bench` command on the terminal: its bar, its table, its files."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from float8_lab.bench.results import check_output, plot_speedups, write_results
from float8_lab.bench.variants import peer_version
from float8_lab.cli.progress import make_console
from float8_lab.cli.table import Rows, print_table
from float8_lab.device import float8_device
from float8_lab.trainer.environment import describe_environment


class Bench:
    """One benchmark on the terminal: what it prints and what it leaves behind.

    Making one refuses what cannot work before anything is measured, and says where this runs.

    Args:
        name: Of the benchmark.
        device: Name of the device.
        output: Where results go.
        **settings: What was asked for, for the results.
    """

    def __init__(self, name: str, device: str, output: Path | None, **settings: Any) -> None:
        self.device = float8_device(device)
        if output is not None:
            check_output(output)
        torch.manual_seed(0)
        self.console = make_console()
        self._name, self._output, self._settings = name, output, settings
        versions = {peer: peer_version(peer) for peer in settings.get("peers", [])}
        self.peers = [peer for peer, version in versions.items() if version is not None]
        self._environment = describe_environment(self.device) | versions
        self.console.print("{device}, torch {torch}".format(**self._environment))
        for peer, version in versions.items():
            if version is None:
                self.console.print(f"{peer} is not installed: left out")

    def collect(self, groups: Iterable[Rows], total: int) -> Rows:
        """All rows; a bar moves with each group where there is a terminal, else a line says so."""
        rows: Rows = []
        columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        hidden = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as bar:
            task = bar.add_task(self._name, total=total)
            for number, group in enumerate(groups, 1):
                rows += group
                bar.advance(task)
                if hidden:
                    self.console.print(f"  {number}/{total}")
        return rows

    def finish(
        self,
        title: str,
        rows: Rows,
        plot: Path | None = None,
        draw: Callable[[Rows, str, Path], None] | None = None,
        **extra: Any,
    ) -> None:
        """Print the table, write the files; `draw` makes the plot, if it is none of speedups."""
        if self.device.type == "cpu" and draw is None:
            title += " (host times)"
        print_table(self.console, title, rows)
        if self._output is not None:
            settings = self._settings
            write_results(self._output, self._name, rows, self._environment, settings, extra)
            self.console.print(f"results: {self._output}")
        if plot is not None:
            where = self._environment["device"]
            if draw is None:
                plot_speedups(rows, f"{title}\nspeedup over bf16, {where}", plot)
            else:
                draw(rows, f"{title}\n{where}", plot)
            self.console.print(f"plot: {plot}")
