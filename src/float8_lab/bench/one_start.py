"""`float8 bench one-start`: bf16 trains until losses no longer jump, then all recipes go on alike.

Runs part ways in their first steps, where losses fall fast: bf16 differs so from itself by half a
percent. From a common start on, what differs is due to the recipe, or noise. With one seed bf16
goes on twice, which shows the noise. With several seeds, each has its own start, and the spread of
their gaps shows it.
"""

import contextlib
import functools
import math
import multiprocessing
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
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

    Yields an empty list for each start and each run, in their order, and the rows of a seed after
    its last run. Validation losses are in nats per byte; gaps in percent, to bf16 of that seed, or
    the mean of both its runs. Rows of several seeds have a `part`, the seed.

    There are `at_once` processes, each with one run at a time. They share the device: a small run
    leaves a GPU idle while the host starts its kernels. Each takes a CPU core or more. A start is
    kept in a temporary file, of 12 bytes per parameter. If it fails or is interrupted, all child
    processes of this one are ended.
    """
    names = runs_of(recipes, seeds)
    used = [HIGH_PRECISION if name == AGAIN else name for name in names]
    of_seeds = [config.replace(seed=config.seed + i, recipe=HIGH_PRECISION) for i in range(seeds)]
    runs = [each.replace(recipe=recipe) for each in of_seeds for recipe in used]
    workers = ProcessPoolExecutor(
        at_once,
        multiprocessing.get_context("spawn"),
        # Ctrl-C is the parent's, which ends them.
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    with tempfile.TemporaryDirectory() as folder, workers as pool, _ended_together() as go_on:
        # By `submit`, for `pool.map` cancels what is left, and a pool that fails then shows errors.
        starts = [pool.submit(_save_start, each, start, folder) for each in of_seeds]
        go_on()
        for saved in starts:
            saved.result()
            yield []
        losses = iter([pool.submit(_train_on, each, folder) for each in runs])
        go_on()
        for each in of_seeds:
            of_seed: list[float] = []
            for _ in names:
                of_seed.append(next(losses).result())
                yield []
            base = statistics.mean(of_seed[: len(names) - len(recipes)])
            part = {"part": f"seed {each.seed}"} if seeds > 1 else {}
            yield [
                {**part, "recipe": name, "val_loss": loss, "gap_percent": 100 * (loss / base - 1)}
                for name, loss in zip(names, of_seed, strict=True)
            ]


@contextlib.contextmanager
def _ended_together() -> Iterator[Callable[[], None]]:
    """End child processes at once when the body fails, or is interrupted or told to end.

    Such a signal raises nothing by itself, since a thread of the pool may wait for a lock that the
    body holds just then. It ends the children, and without them the pool fails in the body. A child
    that is only just beginning is missed: the body calls what this yields when it has begun some,
    which raises KeyboardInterrupt after a signal.
    """
    told = []

    def end(number: int, _: object) -> None:
        told.append(number)
        _end_children()

    def go_on() -> None:
        if told:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield go_on
        go_on()
    except BaseException as error:
        _end_children()
        if told:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_children() -> None:
    for child in multiprocessing.active_children():
        child.terminate()


def runs_of(recipes: Sequence[str], seeds: int) -> list[str]:
    """Return the names of a seed's runs: high precision, twice if it is the only seed, and recipes.

    Two runs in high precision show what noise is; with several seeds their spread does.
    """
    return [HIGH_PRECISION, *[AGAIN] * (seeds == 1), *recipes]


def mean_of_seeds(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each recipe of `rows` of several seeds: means, the gap's standard error."""
    means = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        of_recipe = [row for row in rows if row["recipe"] == recipe]
        gaps = [row["gap_percent"] for row in of_recipe]
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        means.append(
            {
                "part": f"mean of {len(gaps)} seeds",
                "recipe": recipe,
                "val_loss": statistics.mean(row["val_loss"] for row in of_recipe),
                "gap_percent": statistics.mean(gaps),
                "gap_error_percent": error if any(gaps) else None,  # what others are held against
            }
        )
    return means


def _save_start(config: TrainConfig, steps: int, folder: str) -> None:
    """Train for `steps`, and write what runs of this seed need to go on from there."""
    torch.compiler.reset()
    trainer = Trainer(config, _corpus(config.data))
    _train(trainer, steps)
    states = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    torch.save({"step": trainer.step, **states}, _start_of(config, folder))


def _train_on(config: TrainConfig, folder: str) -> float:
    """Return the validation loss of a run that goes on from its seed's start to the last step.

    Histories of delayed scaling begin empty.
    """
    torch.compiler.reset()
    trainer = Trainer(config, _corpus(config.data))
    start = torch.load(_start_of(config, folder))
    missing, unexpected = trainer.model.load_state_dict(start["model"], strict=False)
    assert not unexpected
    assert not set(missing) & {name for name, _ in trainer.model.named_parameters()}
    trainer.optimizer.load_state_dict(start["optimizer"])
    trainer.step = start["step"]
    _train(trainer, config.steps)
    return trainer.validate()


def _start_of(config: TrainConfig, folder: str) -> Path:
    return Path(folder, f"{config.seed}.pt")


def _train(trainer: Trainer, steps: int) -> None:
    trainer.model.train()
    attach_to_optimizer(trainer.model, trainer.optimizer)
    while trainer.step < steps:
        trainer.train_step()
