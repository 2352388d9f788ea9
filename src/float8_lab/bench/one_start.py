"""`float8 bench one-start`: bf16 trains until losses no longer jump, then all recipes go on alike.

Runs part ways in their first steps, where losses fall fast: bf16 differs so from itself by half a
percent. From a common start on, what differs is due to the recipe; bf16 goes on twice to show it.
"""

import copy
import statistics
from collections.abc import Iterator, Sequence

import torch

from float8_lab.bench.step import Row
from float8_lab.trainer.config import HIGH_PRECISION, TrainConfig
from float8_lab.trainer.data import Corpus
from float8_lab.trainer.loop import Trainer

AGAIN = f"{HIGH_PRECISION} again"


def bench_one_start(
    config: TrainConfig, corpus: Corpus, recipes: Sequence[str], start: int
) -> Iterator[list[Row]]:
    """Train each recipe on after `start` steps of high precision; all rows at the end.

    Validation losses are in nats per byte; gaps in percent, to the mean of both runs of bf16.
    """
    first = Trainer(config.replace(recipe=HIGH_PRECISION), corpus)
    _train(first, start)
    rows: list[Row] = []
    for name in (HIGH_PRECISION, AGAIN, *recipes):
        recipe = HIGH_PRECISION if name == AGAIN else name
        trainer = continued(config.replace(recipe=recipe), corpus, first)
        _train(trainer, config.steps)
        rows.append({"recipe": name, "val_loss": trainer.validate()})
        yield []
    base = statistics.mean(row["val_loss"] for row in rows[:2])
    yield [{**row, "gap_percent": 100 * (row["val_loss"] / base - 1)} for row in rows]


def continued(config: TrainConfig, corpus: Corpus, start: Trainer) -> Trainer:
    """Return a run that goes on where `start` is; histories of delayed scaling begin empty."""
    torch.compiler.reset()
    trainer = Trainer(config, corpus)
    missing, unexpected = trainer.model.load_state_dict(start.model.state_dict(), strict=False)
    assert not unexpected
    assert not set(missing) & {name for name, _ in trainer.model.named_parameters()}
    # It keeps the tensors that it is given, and writes into them.
    trainer.optimizer.load_state_dict(copy.deepcopy(start.optimizer.state_dict()))
    trainer.step = start.step
    return trainer


def _train(trainer: Trainer, steps: int) -> None:
    trainer.model.train()
    while trainer.step < steps:
        trainer.train_step()
