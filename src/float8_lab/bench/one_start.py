"""`float8 bench one-start`: bf16 trains until losses no longer jump, then all recipes go on alike.

Runs part ways in their first steps, where losses fall fast: bf16 differs so from itself by half a
percent. From a common start on, what differs is due to the recipe, or noise.
"""

import functools
import math
import multiprocessing
import signal
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from float8 import attach_to_optimizer
from float8_lab.bench.step import Row
from float8_lab.trainer.config import HIGH_PRECISION, TrainConfig
from float8_lab.trainer.data import load_corpus
from float8_lab.trainer.loop import Trainer

AGAIN = f"{HIGH_PRECISION} again"

_corpus = functools.cache(load_corpus)  # once in each process


def bench_one_start(
    config: TrainConfig, recipes: Sequence[str], start: int, *, seeds: int = 1, at_once: int = 1
) -> Iterator[list[Row]]:
    """Train each recipe on after `start` steps of high precision, for seeds from `config.seed` on.

    Yields all rows so far after each start, and after the last run of each seed. Gaps are in
    percent, to bf16 of that seed, or the mean of both its runs. Rows of several seeds have a
    `part`, the seed. `at_once` processes with one run each share the device. A start is kept in a
    temporary file, of 12 bytes per parameter.
    """
    rows: list[Row] = []
    names = [HIGH_PRECISION, *[AGAIN] * (seeds == 1), *recipes]
    of_seeds = [config.replace(seed=config.seed + i, recipe=HIGH_PRECISION) for i in range(seeds)]
    spawn = multiprocessing.get_context("spawn")
    ignore = signal.SIGINT, signal.SIG_IGN  # Ctrl-C is the parent's, which ends them
    workers = ProcessPoolExecutor(at_once, spawn, signal.signal, ignore)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder, workers as pool:
        try:
            for saved in [pool.submit(_save_start, each, start, folder) for each in of_seeds]:
                saved.result()
                yield [*rows]
            runs = [x.replace(recipe=n.removesuffix(" again")) for x in of_seeds for n in names]
            losses = [pool.submit(_train_on, run, folder) for run in runs]
            for i, each in enumerate(of_seeds):
                of_seed = [x.result() for x in losses[i * len(names) :][: len(names)]]
                base = statistics.mean(of_seed[: len(names) - len(recipes)])
                part = {"part": f"seed {each.seed}"} if seeds > 1 else {}
                for name, x in zip(names, of_seed, strict=True):
                    gap = {"val_loss": x, "gap_percent": 100 * (x / base - 1)}
                    rows.append({**part, "recipe": name, **gap})
                yield [*rows]
        except BaseException:  # also if it is interrupted: none trains on
            for child in multiprocessing.active_children():
                child.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def mean_of_seeds(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each recipe of `rows` of several seeds: means, the gap's standard error."""
    means = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        of_recipe = [row for row in rows if row["recipe"] == recipe]
        gaps = [row["gap_percent"] for row in of_recipe]
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        loss = statistics.mean(row["val_loss"] for row in of_recipe)
        mean = {"part": f"mean of {len(gaps)} seeds", "recipe": recipe, "val_loss": loss}
        mean["gap_percent"] = statistics.mean(gaps)
        mean["gap_error_percent"] = error if any(gaps) else None  # what others are held against
        means.append(mean)
    return means


def _save_start(config: TrainConfig, steps: int, folder: str) -> None:
    """Train for `steps`, and write what runs of this seed need to go on from there."""
    trainer = _trained(config, steps)
    states = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    torch.save({"step": trainer.step, **states}, Path(folder, f"{config.seed}.pt"))


def _train_on(config: TrainConfig, folder: str) -> float:
    """Return the validation loss of a run that goes on from its seed's start to the last step.

    Histories of delayed scaling begin empty.
    """
    return _trained(config, config.steps, Path(folder, f"{config.seed}.pt")).validate()


def _trained(config: TrainConfig, steps: int, start: Path | None = None) -> Trainer:
    torch.compiler.reset()
    trainer = Trainer(config, _corpus(config.data))
    if start is not None:
        saved = torch.load(start)
        missing, unexpected = trainer.model.load_state_dict(saved["model"], strict=False)
        assert not unexpected
        assert not set(missing) & {name for name, _ in trainer.model.named_parameters()}
        trainer.optimizer.load_state_dict(saved["optimizer"])
        trainer.step = saved["step"]
    trainer.model.train()
    attach_to_optimizer(trainer.model, trainer.optimizer)
    while trainer.step < steps:
        trainer.train_step()
    return trainer
