"""`float8 compare`: the same training under several recipes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from float8_lab.cli import options
from float8_lab.cli.options import OUTPUT
from float8_lab.cli.progress import ConsoleProgress, make_console
from float8_lab.trainer.compare import Comparison, compare
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.interrupt import stop_on_signals
from float8_lab.trainer.ranks import refuse
from float8_lab.trainer.report import HEADINGS, cells

FAILED_EXIT = 1


def compare_command(
    context: typer.Context,
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE...",
            help="Recipes to hold against high precision, which is always run first.",
        ),
    ],
    model: options.Model = None,
    data: options.Data = None,
    seq_len: options.SeqLen = None,
    vocab_size: options.VocabSize = None,
    tied_head: options.TiedHead = None,
    seed: options.Seed = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    accumulate: options.Accumulate = None,
    learning_rate: options.LearningRate = None,
    min_lr_ratio: options.MinLrRatio = None,
    warmup_steps: options.WarmupSteps = None,
    weight_decay: options.WeightDecay = None,
    beta1: options.Beta1 = None,
    beta2: options.Beta2 = None,
    grad_clip: options.GradClip = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    compile: options.Compile = None,
    activation_checkpointing: options.ActivationCheckpointing = None,
    output: Annotated[
        str, typer.Option(help="Folder of the comparison.", rich_help_panel=OUTPUT)
    ] = "runs/compare",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with an interrupted comparison; finished runs are kept.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an earlier comparison in the same folder.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    log_interval: options.LogInterval = None,
    eval_interval: Annotated[
        int | None,
        options.option(
            "--eval-interval", "Steps between validations.", OUTPUT, "a fifth of the steps"
        ),
    ] = None,
    eval_batches: options.EvalBatches = None,
    checkpoint_interval: options.CheckpointInterval = None,
    tensorboard: options.Tensorboard = None,
    debug: options.Debug = False,
) -> None:
    """Train high precision and each RECIPE from the same seed on the same data, and compare.

    Writes report.json, report.md and loss.png, besides a folder per run. Ctrl-C leaves a
    checkpoint of the run under way; the same command with --resume goes on from it.
    """
    if "RANK" in os.environ:
        refuse("float8 compare got ranks of torchrun, but keeps to one device: run it without")
    given = {"final_checkpoint": False, **options.settings(context)}
    config = TrainConfig.create(**given)
    if eval_interval is None:
        config = config.replace(eval_interval=max(config.steps // 5, 1))
    console = make_console()
    with stop_on_signals(options.STOP_NOTICE) as stop:
        comparison = compare(
            config,
            recipes,
            resume=resume,
            overwrite=overwrite,
            observers=lambda recipe: [ConsoleProgress(console)],
            stop=stop,
        )
    console.print(_table(comparison))
    console.print(f"report: {comparison.report}")
    if comparison.plot:
        console.print(f"loss curves: {comparison.plot}")
    if comparison.interrupted:
        console.print("interrupted: go on with the same command and --resume")
        raise typer.Exit(options.INTERRUPTED_EXIT)
    for row in comparison.failed:
        sys.stderr.write(f"error: {row.recipe}: {row.error}\n")
    if comparison.failed:
        raise typer.Exit(FAILED_EXIT)


def _table(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="losses in nats per byte", title_justify="left")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in comparison.rows:
        table.add_row(*cells(row))
    return table
