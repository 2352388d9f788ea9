"""`float8 bench numerics`: how exact each recipe is, on random tensors and on those of a model."""

import functools
import itertools
from pathlib import Path
from typing import Annotated

import torch
import typer

from float8_lab.bench.numerics import (
    FAMILIES,
    STEPS,
    Sample,
    bench_numerics,
    captured_samples,
    plot_numerics,
    random_samples,
)
from float8_lab.bench.variants import EAGER, make_variants
from float8_lab.cli.bench import Bench, Place, Shapes, Words, app, words
from float8_lab.cli.options import takes
from float8_lab.errors import ConfigError
from float8_lab.trainer.checkpoint import check_checkpoint
from float8_lab.trainer.config import RECIPES, TrainConfig
from float8_lab.trainer.data import check_length, load_corpus, train_batch
from float8_lab.trainer.loop import Trainer
from float8_lab.trainer.run_folder import RunFolder, find_checkpoint, saved_config

_MODEL, _STEPS = "tiny", 20  # what is trained if nothing is said
_TOKENS = 4096  # of a captured batch, about


@app.command("numerics")
@takes({"mkn": ["2048,1024,3072"]}, layers=Shapes, where=Place)
def numerics_command(
    layers: Shapes,
    where: Place,
    recipe: Annotated[
        Words, typer.Option(help="Several: with commas; as for `linear`.", show_default="all")
    ] = None,
    peers: Annotated[Words, "Also torchao, te (TransformerEngine) or torchao,te."] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="A run's folder (its newest checkpoint is meant) or one checkpoint of the model "
            "whose tensors are captured.",
            show_default=f"{_MODEL}, trained for {_STEPS} steps",
        ),
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=0, help="Of the model.", show_default="the middle one")
    ] = None,
    plot: Annotated[Path | None, "Draw the SQNR of each recipe."] = None,
) -> None:
    """SQNR in dB of a layer's three GEMMs against float64, under each recipe.

    On random tensors of the given shapes, of several families, and on what the layers of one block
    of a trained model read in a batch of its training data. Delayed scaling has seen three steps
    before. `even` counts all tokens alike, of grad_weight all channels, though a few may have most
    of the power. Underflow and saturation: shares of nonzero elements that become zero, or are cut.
    """
    chosen = {"recipes": words(recipe) or RECIPES, "peers": words(peers)}
    shapes = [shape for members in layers.selected().values() for shape in members]
    bench = Bench("numerics", where, shapes=shapes, **chosen)
    variants = make_variants(chosen["recipes"], [EAGER], chosen["peers"])
    trainer = _trained(checkpoint, bench.device)
    config = trainer.config
    blocks = config.model_config().n_layers
    block = blocks // 2 if block is None else block
    if block >= blocks:
        raise ConfigError(f"block: got {block}, expected less than {blocks}")
    captured = _captured(trainer, f"layers.{block}.")
    samples = itertools.chain(random_samples(shapes, bench.device), captured.items())
    total = len(FAMILIES) * len(shapes) + len(captured)
    rows = bench.collect(bench_numerics(samples, variants), total)
    run = {"model": config.model, "recipe": config.recipe, "step": trainer.step, "block": block}
    title = (
        f"{', '.join(map(str, shapes))}; then block {block} of {config.model} after step "
        f"{trainer.step} of {config.recipe}"
    )
    bench.finish(title, rows, plot, draw=plot_numerics, trained=run)


def _trained(checkpoint: Path | None, device: torch.device) -> Trainer:
    """A run after its checkpoint, or after a few steps; it leaves no files."""
    config = TrainConfig.create(model=_MODEL, steps=_STEPS)
    if checkpoint is not None:
        checkpoint = find_checkpoint(checkpoint)
        check_checkpoint(checkpoint)
        config = saved_config(checkpoint)
    config = config.replace(device=str(device), compile=False, activation_checkpointing=False)
    corpus = load_corpus(config.data)
    check_length(corpus, config.seq_len)
    trainer = Trainer(config, corpus, RunFolder(Path(config.output)))
    if checkpoint is not None:
        trainer.restore(checkpoint)
    else:
        for _ in range(_STEPS):
            trainer.train_step()
    return trainer


def _captured(trainer: Trainer, prefix: str) -> dict[str, Sample]:
    """Of the batches that the run would see next, cut to a few thousand tokens."""
    config = trainer.config
    size = min(config.batch_size, max(1, _TOKENS // config.seq_len))
    cut = {"seed": config.seed, "batch_size": size, "seq_len": config.seq_len}
    first = trainer.step * config.accumulate * config.batch_size
    numbers = range(first, first + STEPS * size, size)
    batches = (train_batch(trainer.corpus.train, first=number, **cut) for number in numbers)
    losses = [functools.partial(trainer.loss, batch) for batch in batches]
    return captured_samples(trainer.model, prefix, losses)
