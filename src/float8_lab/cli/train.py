"""`float8 train`: one training run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from float8_lab.cli.options import INTERRUPTED_EXIT, App, given, settings, takes
from float8_lab.cli.progress import ConsoleProgress, make_console, stop_on_signals
from float8_lab.trainer.config import OUTPUT, TrainConfig
from float8_lab.trainer.metrics import FINISHED, INTERRUPTED, read_metrics

app = App()
_RESUME = "A run's folder (its newest checkpoint is meant) or one checkpoint. Settings come from "
_RESUME += "there; giving others is refused, but for more --steps."


@app.command()
@takes(chosen=settings())
def train_command(
    chosen: Any,
    resume: Annotated[str | None, typer.Option(help=_RESUME, rich_help_panel=OUTPUT)] = None,
) -> None:
    """Train a Llama on bytes of text with a float8 recipe, or in high precision.

    Leaves metrics, TensorBoard events and checkpoints in the output folder. Ctrl-C (or SIGTERM)
    finishes the step, saves a checkpoint and says how to go on from it.
    """
    from float8_lab.trainer.loop import train
    from float8_lab.trainer.run_folder import find_checkpoint, saved_config

    console, checkpoint = make_console(), None
    with stop_on_signals() as stop:
        if resume is None:
            config = TrainConfig.create(**given(chosen))
        else:
            checkpoint = find_checkpoint(Path(resume))
            config = saved_config(checkpoint).replace(**given(chosen))
        progress = ConsoleProgress(console)
        run = train(config, observers=[progress], resume=checkpoint, stop=stop)
    folder, validation = run.folder.path, read_metrics(run.folder.metrics).validation
    console.print(f"{run.status} after step {run.step} of {config.steps}")
    if validation:
        console.print(f"validation loss {validation[-1].loss:.4f} nats per byte")
    console.print(f"everything is in {folder}")
    if run.status != FINISHED:
        console.print(f"go on with: float8 train --resume {folder}")
    if run.status == INTERRUPTED:
        raise typer.Exit(INTERRUPTED_EXIT)
