"""What the trainer's tests run on each rank; `Ranks.run` finds it here by name."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import support.nano  # noqa: F401 - its models
from float8_lab.errors import LabError
from float8_lab.ranks import join_ranks
from float8_lab.trainer import loop
from float8_lab.trainer.checkpoint import save_checkpoint
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.data import load_corpus
from float8_lab.trainer.loop import train
from float8_lab.trainer.metrics import read_metrics
from float8_lab.trainer.run_folder import RunFolder, find_checkpoint
from support.listener import Listener
from support.spies import Traffic

Curves = tuple[list[tuple[float, float]], list[float]]
"""Loss and gradient norm of each step, and the validation losses."""


def config_of(settings: dict[str, Any]) -> TrainConfig:
    """Of a small run in high precision, but for these settings."""
    defaults = {"model": "nano", "recipe": "high_precision", "device": "cpu"}
    defaults |= {"tensorboard": False, "eval_batches": 2, "log_interval": 2}
    return TrainConfig.create(**(defaults | settings))


def train_here(settings: dict[str, Any], **how: Any) -> loop.Trainer:
    """A run on the ranks that there are."""
    config = config_of(settings)
    with join_ranks(config.fsdp) as ranks:
        return train(config, ranks=ranks, **how)


def curves(settings: dict[str, Any], resume: Path | None = None) -> Curves:
    with mock.patch.object(nn.Module, "compile", _compile_quickly):
        torch._dynamo.reset()
        checkpoint = resume and find_checkpoint(resume)
        return curves_of(train_here(settings, resume=checkpoint).folder.path)


def curves_of(folder: Path) -> Curves:
    """Of what is in the folder of a run."""
    metrics = read_metrics(RunFolder(folder).metrics)
    assert [record.step for record in metrics.train] == list(range(1, len(metrics.train) + 1))
    return [(r.loss, r.grad_norm) for r in metrics.train], [v.loss for v in metrics.validation]


_compile = nn.Module.compile


def _compile_quickly(module: nn.Module, **options: Any) -> None:
    _compile(module, backend="aot_eager", **options)


def several(runs: list[dict[str, Any]]) -> list[Curves]:
    return [curves(settings) for settings in runs]


def gathered(settings: dict[str, Any]) -> set[torch.dtype]:
    """In what dtypes weights travel."""
    with Traffic() as seen:
        curves(settings)
    return seen.gather_dtypes


def shards_between_microbatches(settings: dict[str, Any]) -> list[bool]:
    """Before each training forward: whether all gradients of this step until now are shards."""
    seen: list[bool] = []
    plain = loop.Trainer.loss

    def loss(trainer: loop.Trainer, batch: Tensor) -> Tensor:
        if trainer.model.training:
            seen.append(all(isinstance(p.grad, DTensor) for p in trainer.model.parameters()))
        return plain(trainer, batch)

    with mock.patch.object(loop.Trainer, "loss", loss):
        curves(settings)
    return seen


def written_again(settings: dict[str, Any], checkpoint: Path, target: Path) -> None:
    """Restore a checkpoint and save what was restored."""
    config = config_of(settings)
    with join_ranks(config.fsdp) as ranks:
        trainer = loop.Trainer(config, load_corpus(config.data), ranks=ranks)
        trainer.restore(checkpoint)
        save_checkpoint(target, trainer.step, trainer.state(), keep=1, ranks=ranks)


def interrupted(settings: dict[str, Any], who: int) -> tuple[str, int, list[str]]:
    """Someone asks rank `who` alone to stop after step 3; status, steps, what observers hear."""
    stop, listener = Event(), Listener()
    plain = loop.Trainer.train_step

    def step(trainer: loop.Trainer) -> None:
        plain(trainer)
        if trainer.ranks.rank == who and trainer.step == 3:
            stop.set()

    with mock.patch.object(loop.Trainer, "train_step", step):
        run = train_here(settings, observers=[listener], stop=stop)
    return run.status, run.step, listener.events


def error_of(
    settings: dict[str, Any], how: str = "", who: int = 0, resume: Path | None = None
) -> str:
    """Type and text of what this rank raises; `how` something goes wrong on rank `who` alone."""
    mine = dist.get_rank() == who

    def poisoned(logits: Tensor, targets: Tensor) -> Tensor:
        loss = plain_loss(logits, targets)
        return loss * float("nan") if mine and loss.requires_grad else loss

    def full(number: int) -> None:
        if mine:
            raise OSError(28, "No space left on device")

    def corpus(path: str) -> Any:
        found = load_corpus(path)
        return replace(found, fingerprint="other") if mine else found

    plain_loss = loop.F.cross_entropy
    patches: dict[str, Any] = {
        "": nullcontext(),
        "nan": mock.patch.object(loop.F, "cross_entropy", poisoned),
        "disk full": mock.patch("os.fsync", full),
        "other data": mock.patch.object(loop.data, "load_corpus", corpus),
    }
    with patches[how], pytest.raises(LabError) as caught:
        train_here(settings, resume=resume)
    return f"{caught.type.__name__}: {caught.value}"
