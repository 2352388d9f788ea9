"""`float8 compare`: the same training under several recipes."""

import functools
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from float8_lab.cli.options import INTERRUPTED_EXIT, App, given, settings, takes
from float8_lab.cli.progress import ConsoleProgress, make_console, stop_on_signals
from float8_lab.cli.table import print_table
from float8_lab.trainer.config import HIGH_PRECISION, OUTPUT, TrainConfig, check_alone
from float8_lab.trainer.metrics import FAILED, FINISHED, MEAN

_FIXED = ("recipe", "rounded_start", "output", "keep_checkpoints", "final_checkpoint", "stop_after")
_option = functools.partial(typer.Option, rich_help_panel=OUTPUT)

app = App()


@app.command()
@takes(chosen=settings(but=_FIXED, eval_interval="a fifth of the steps"))
def compare_command(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE...",
            help="Recipes, or MODULE:NAME of your own, to hold against high precision, run first.",
        ),
    ],
    chosen: Any,
    repeats: Annotated[int, _option(help="Seeds to train with, from --seed on.", min=1)] = 1,
    noise: Annotated[
        bool, _option(help="Train high precision twice: the difference is the noise of gaps.")
    ] = True,
    at_once: Annotated[
        int, _option(help="Runs at the same time, each in a process; they share all GPUs.", min=1)
    ] = 1,
    output: Annotated[str, _option(help="Folder of the comparison.")] = "runs/compare",
    resume: Annotated[
        bool, _option("--resume", help="Go on with an interrupted one; finished runs are kept.")
    ] = False,
    overwrite: Annotated[
        bool, _option("--overwrite", help="Replace an earlier one in the same folder.")
    ] = False,
) -> None:
    """Train high precision and each RECIPE from the same seeds, on the same data.

    High precision is trained twice, the second time from weights that are rounded to float8 once.
    By how much both end apart is the noise. With one seed a gap says little, even if it is larger.
    Writes report.json, report.txt and loss.png, besides a folder per run. Ctrl-C leaves
    checkpoints of the runs under way; the same command with --resume goes on from them, also with
    more --repeats.
    """
    check_alone()
    console = make_console()
    console.print(f"training {HIGH_PRECISION}, then {', '.join(recipes)}")  # imports take seconds
    from float8_lab.trainer.compare import compare

    options: Any = {"recipe": HIGH_PRECISION, "final_checkpoint": False, "output": output}
    config = TrainConfig.create(**options, **given(chosen))
    if chosen.eval_interval is None:
        config = config.replace(eval_interval=max(config.steps // 5, 1))
    with stop_on_signals() as stop:
        options = {"resume": resume, "overwrite": overwrite, "stop": stop}
        options |= {"repeats": repeats, "noise": noise, "at_once": at_once}
        progress = ConsoleProgress(console if at_once == 1 else None)
        report = compare(config, recipes, [progress], **options)
    rows = report.get("recipes", [])
    if config.device.startswith("cpu"):
        console.print(
            "On CPUs float8 is slower. What gains on a GPU: float8 plan --gpu H100 MODULE:FUNCTION"
        )
    title = f"means of {repeats} seeds; " if repeats > 1 else "one seed, so gaps say little; "
    for row in rows:
        row["recipe"] += f" ({row['status']})" * (row["status"] != FINISHED)
        row["peak_gib"] = row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**30
    with Path(output, "report.txt").open("w", encoding="utf-8") as file:
        for where in (console, Console(file=file, width=120)):
            print_table(where, f"{title}nats per byte; train loss: {MEAN}", rows)
    console.print(f"report: {output}/report.json, {output}/report.txt")
    if Path(output, "loss.png").exists():
        console.print(f"loss curves: {output}/loss.png")
    if stop.is_set():
        console.print("interrupted: go on with the same command and --resume")
        raise typer.Exit(INTERRUPTED_EXIT)
    if failed := [row for row in rows if row["status"] == FAILED]:
        sys.stderr.writelines(f"error: {row['recipe']}: {row['error']}\n" for row in failed)
        raise typer.Exit(1)
