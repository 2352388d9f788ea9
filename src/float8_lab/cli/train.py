"""`float8 train`: one training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from float8_lab.cli import options
from float8_lab.cli.options import OUTPUT
from float8_lab.cli.progress import ConsoleProgress, make_console
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.interrupt import stop_on_signals
from float8_lab.trainer.metrics import FINISHED, INTERRUPTED
from float8_lab.trainer.ranks import LAUNCH, Ranks, join_ranks
from float8_lab.trainer.run_folder import find_checkpoint, saved_config
from float8_lab.trainer.train import TrainResult, train


def train_command(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="high_precision for no float8, or tensorwise or delayed.",
            show_default="high_precision",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
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
    fsdp: options.Fsdp = False,
    fsdp_float8_all_gather: options.FsdpFloat8AllGather = False,
    hsdp: options.Hsdp = None,
    output: Annotated[
        str | None,
        typer.Option(
            help="Folder of the run.", show_default="runs/MODEL-RECIPE", rich_help_panel=OUTPUT
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="A run's folder (its newest checkpoint is meant) or one checkpoint. "
            "Settings come from there; giving others is refused.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    log_interval: options.LogInterval = None,
    eval_interval: options.EvalInterval = None,
    eval_batches: options.EvalBatches = None,
    checkpoint_interval: options.CheckpointInterval = None,
    keep_checkpoints: options.KeepCheckpoints = None,
    stop_after: options.StopAfter = None,
    tensorboard: options.Tensorboard = None,
    debug: options.Debug = False,
) -> None:
    """Train a Llama on bytes of text, in high precision or with a float8 recipe.

    Leaves metrics, TensorBoard events and checkpoints in the output folder. Ctrl-C (or SIGTERM)
    finishes the step, saves a checkpoint and says how to go on from it.

    On several GPUs: torchrun --nproc-per-node 8 --no-python float8 train --fsdp ...
    """
    given = options.settings(context)
    with join_ranks(fsdp) as ranks:
        notice = options.STOP_NOTICE if ranks.is_first else ""
        with stop_on_signals(notice) as stop:
            config, checkpoint = ranks.once(lambda: _settings(given, resume))
            console = make_console()
            progress = ConsoleProgress(console)
            result = train(config, observers=[progress], resume=checkpoint, stop=stop, ranks=ranks)
    _say(console, config, result, ranks)
    if result.status == INTERRUPTED:
        raise typer.Exit(options.INTERRUPTED_EXIT)


def _settings(given: dict[str, Any], resume: str | None) -> tuple[TrainConfig, Path | None]:
    """The run's settings, and the checkpoint that it goes on from."""
    if resume is None:
        return TrainConfig.create(**given), None
    checkpoint = find_checkpoint(Path(resume))
    return saved_config(checkpoint).replace(**given), checkpoint


def _say(console: Console, config: TrainConfig, result: TrainResult, ranks: Ranks) -> None:
    say = console.print
    say(f"{result.status} after step {result.summary.steps} of {config.steps}")
    if result.summary.val_loss is not None:
        say(f"validation loss {result.summary.val_loss:.4f} nats per byte")
    say(f"everything is in {result.folder.path}")
    if result.status != FINISHED:
        say(f"go on with: {_command(config, ranks)} --resume {result.folder.path}")


def _command(config: TrainConfig, ranks: Ranks) -> str:
    """What starts a run on as many ranks, in the same way."""
    if not ranks.sharded:
        return "float8 train"
    words = [LAUNCH.format(ranks=ranks.size)]
    if config.fsdp_float8_all_gather:
        words.append("--fsdp-float8-all-gather")
    if config.hsdp > 1:
        words.append(f"--hsdp {config.hsdp}")
    return " ".join(words)
