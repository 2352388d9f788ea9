"""One training run, from settings to its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import torch

from float8_lab.errors import DataError, OutOfMemoryError
from float8_lab.trainer import data
from float8_lab.trainer.checkpoint import check_checkpoint, read_state
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.loop import Trainer
from float8_lab.trainer.metrics import (
    JsonLines,
    Observer,
    Summary,
    TensorBoard,
    read_metrics,
    summarize,
)
from float8_lab.trainer.ranks import Ranks, join_ranks
from float8_lab.trainer.run_folder import RunFolder, find_checkpoint, open_run_folder

# torch has no exception of its own for these.
_SIGNS_OF_TOO_MUCH = (
    "DefaultCPUAllocator: ",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
)


@dataclass(frozen=True)
class TrainResult:
    """How a run went.

    Attributes:
        status: `"finished"`, `"interrupted"` (by a signal) or `"stopped"` (by `stop_after`).
        summary: The run's numbers, over all its parts if it was resumed.
        folder: Where everything was written.
        checkpoint: Checkpoint of the last step, None if none was asked for.
    """

    status: str
    summary: Summary
    folder: RunFolder
    checkpoint: Path | None


def train(
    config: TrainConfig,
    *,
    observers: Sequence[Observer] = (),
    resume: Path | None = None,
    corpus: data.Corpus | None = None,
    stop: Event | None = None,
    ranks: Ranks | None = None,
) -> TrainResult:
    """Train a Llama as `config` says and leave everything in `config.output`.

    With `config.fsdp` all ranks call it alike; the first one writes and tells observers.

    Args:
        config: The settings.
        observers: Told what happens, besides the JSON lines and TensorBoard files.
        resume: A checkpoint, or the folder of a run whose newest one is meant.
        corpus: The data, if it is loaded already.
        stop: Ends the run after the step in which it is requested on any rank, with a checkpoint.
        ranks: Who trains, if they have met already: see `join_ranks`.

    Returns:
        The run's numbers and where its files are.

    Raises:
        DataError: If there is no usable data.
        ConfigError: If the output folder holds another run, a resumed run's settings differ, the
            recipe does not work on the device, or the ranks do not fit the settings.
        CheckpointError: If there is nothing to resume or it is damaged.
        TrainingDivergedError: If the loss or the gradient norm is not finite any more.
        OutOfMemoryError: If the model does not fit.
        RankFailedError: If another rank is gone.
    """
    if ranks is None:
        with join_ranks(config.fsdp) as met:
            return train(
                config, observers=observers, resume=resume, corpus=corpus, stop=stop, ranks=met
            )
    text = ranks.together(lambda: _usable_corpus(config, corpus, ranks))
    fingerprints = ranks.gather(text.fingerprint)
    ranks.once(lambda: _check_same_text(fingerprints))
    checkpoint = None
    if resume is not None:
        checkpoint = ranks.once(lambda: find_checkpoint(resume))
        check_checkpoint(checkpoint, ranks)
    folder = ranks.once(lambda: open_run_folder(config, text, checkpoint=checkpoint))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_explain_out_of_memory(config))
        everyone: list[Observer] = []
        if ranks.rank == 0:
            everyone = [*observers, JsonLines(folder.metrics)]
            for observer in everyone:
                stack.callback(observer.close)
            if config.tensorboard:
                start_step = read_state(checkpoint)["step"] if checkpoint else 0
                everyone.append(TensorBoard(folder.tensorboard, start_step))
                stack.callback(everyone[-1].close)
        trainer = Trainer(config, text, folder, everyone, ranks)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        if trainer.conversion and ranks.rank == 0:
            folder.conversion.write_text(trainer.conversion + "\n")
        status = trainer.run(stop or Event())
    return TrainResult(
        status=status,
        summary=ranks.once(lambda: summarize(read_metrics(folder.metrics))),
        folder=folder,
        checkpoint=trainer.last_checkpoint,
    )


def _usable_corpus(config: TrainConfig, corpus: data.Corpus | None, ranks: Ranks) -> data.Corpus:
    ranks.check_fits(config.batch_size, config.hsdp)
    corpus = corpus if corpus is not None else data.load_corpus(config.data)
    data.check_length(corpus, config.seq_len)
    return corpus


def _check_same_text(fingerprints: list[str]) -> None:
    """Each rank takes its part of one order, so all must read the same text."""
    other = next((rank for rank, it in enumerate(fingerprints) if it != fingerprints[0]), None)
    if other is not None:
        raise DataError(
            f"rank {other} reads other data than rank 0 (fingerprint {fingerprints[other]} and "
            f"not {fingerprints[0]}): give a --data that is the same on all hosts"
        )


@contextlib.contextmanager
def _explain_out_of_memory(config: TrainConfig) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not (known or any(sign in str(error) for sign in _SIGNS_OF_TOO_MUCH)):
            raise
        raise OutOfMemoryError(
            f"{config.device} ran out of memory with batches of {config.batch_size} x "
            f"{config.seq_len} tokens: lower --batch-size (and raise --accumulate by as much), "
            "use --activation-checkpointing, or choose a smaller model"
        ) from error
