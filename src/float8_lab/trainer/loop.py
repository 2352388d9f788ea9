"""One training run, from settings to its result: steps, validation, checkpoints, observers."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from float8 import attach_to_optimizer
from float8_lab.device import Clock, PeakMemory, explain_out_of_memory, total_memory
from float8_lab.errors import DataError, OutOfMemoryError, TrainingDivergedError, for_all
from float8_lab.ranks import ALONE, Ranks, join_ranks
from float8_lab.trainer import build, data, metrics
from float8_lab.trainer.checkpoint import (
    check_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.metrics import Observer, StepRecord, ValidationRecord
from float8_lab.trainer.run_folder import RunFolder, describe_run, find_checkpoint, open_run_folder

WARMUP_STEPS = 10  # Not counted for throughput: compilation, allocator, clocks.


class Trainer:
    """A run under way: model, optimizer, and how many steps are done."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: data.Corpus,
        observers: Sequence[Observer] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.folder = RunFolder(config.output)
        self.observers = observers
        self.ranks = ranks
        self.device = ranks.together(lambda: ranks.device(config.device))
        self.memory = PeakMemory(self.device)
        self.timer = Clock(self.device)
        self.step = 0
        self.last_checkpoint: Path | None = None
        self._mine = ranks.share(config.batch_size, config.tp)
        self._token_parts = config.tp if config.sequence_parallel else 1
        self.model, self.conversion = build.build_model(config, self.device, ranks)
        self.optimizer = build.build_optimizer(self.model, config)
        self._first_step = 0
        self._saved_step = -1
        self._pending: list[tuple[Tensor, Tensor]] = []  # Loss and norm, still on the device.

    def restore(self, checkpoint: Path) -> None:
        """Go back to where `checkpoint` was written."""
        self.step = self._first_step = int(read_state(checkpoint)["step"])
        load_checkpoint(checkpoint, self.state(), self.ranks)
        self._saved_step, self.last_checkpoint = self.step, checkpoint

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, to be saved or to be loaded into. Nothing in training is random.

        What the optimizer has gathered, by the names of parameters; its settings are not among it.
        Before the first step that is nothing, and torch would take a step to make something.
        """
        if not self.step:
            return {"model": self.model}
        gathered = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        return {"model": self.model, "optimizer": gathered}

    def run(self, stop: Event) -> str:
        """Train until the last step, a request to stop, or `stop_after`; returns the status."""
        config = self.config
        self.model.train()
        # Not earlier: restoring takes a step to make the optimizer's state.
        attach_to_optimizer(self.model, self.optimizer)
        try:
            self._tell("on_start", self)
            while self.step < config.last_step and not self.ranks.any(stop.is_set()):
                self.train_step()
                self._tell("on_step", self.step)
                if self._due(config.log_interval):
                    self._report(check=True)
                if self._due(config.eval_interval) or self.step == config.steps:
                    self._report(check=True)
                    self._tell("on_validation", ValidationRecord(self.step, self.validate()))
                if self._due(config.checkpoint_interval):
                    self._save()
            self._report(check=True)
            status = metrics.FINISHED
            if self.step < config.steps:
                stopping = self.ranks.any(stop.is_set())
                status = metrics.INTERRUPTED if stopping else metrics.STOPPED
            if config.final_checkpoint or status != metrics.FINISHED:
                self._save()
        except BaseException:
            # Whatever happened, the steps that were done go on record: of several ranks, which
            # may not be there any more, those that were reduced.
            with contextlib.suppress(Exception):
                if self.ranks.size == 1:
                    self._report(check=False)
            with contextlib.suppress(Exception):
                self._tell("on_end", metrics.FAILED, self.step)
            raise
        self._tell("on_end", status, self.step)
        return status

    def train_step(self) -> None:
        """Forward, backward and optimizer, without waiting for the device."""
        config, step = self.config, self.step + 1
        self.timer.mark()
        for group in self.optimizer.param_groups:
            group["lr"] = build.learning_rate(step, config)
        loss = torch.zeros((), device=self.device)
        for index in range((step - 1) * config.accumulate, step * config.accumulate):
            batch = data.train_batch(
                self.corpus.train,
                seed=config.seed,
                first=index * config.batch_size + self._mine.start,
                batch_size=self._mine.stop - self._mine.start,
                seq_len=config.seq_len,
            )
            if config.accumulate > 1 and isinstance(self.model, FSDPModule):
                # Gradients become shards at once: no rank has room for those of a whole model.
                # Only replicas can wait for the last.
                last = index == step * config.accumulate - 1
                self.model.set_requires_all_reduce(last)
            part = self.loss(batch) / config.accumulate
            # The means of ranks that share tokens are summed up by what they do in backward.
            (part / self._token_parts).backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        for parameter in self.model.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and any(x.is_partial() for x in grad.placements):
                # Of the rank's own tokens: summed once, not for the norm and for the step.
                parameter.grad = grad.redistribute(placements=[Replicate()])
        limit = config.grad_clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)  # before, of all ranks
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.timer.mark()
        self._pending.append((loss, norm))
        self.step = step

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def loss(self, batch: Tensor) -> Tensor:
        """Mean loss of this rank's tokens of a batch [batch, seq + 1] uint8 from the CPU.

        In nats per byte. Ranks of sequence parallel have parts of the tokens, others all of them.
        """
        if self.device.type == "cuda":
            batch = batch.pin_memory().to(self.device, non_blocking=True)
        tokens = batch.long()
        with build.autocast(self.config, self.device):
            logits = self.model(tokens[:, :-1])
        parts = self._token_parts
        targets = tokens[:, 1:].chunk(parts, 1)[self.ranks.rank % parts]
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the validation batches, nats per byte; collective."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in data.validation_batches(
            self.corpus.validation,
            batches=self.config.eval_batches,
            batch_size=self.config.batch_size,
            seq_len=self.config.seq_len,
        ):
            total += self.loss(batch[self._mine])
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # The root stays gathered until a backward.
        self.model.train()
        return self.ranks.mean(total).item() / self.config.eval_batches

    def _report(self, *, check: bool) -> None:
        """Read the losses since the last time from the device and pass them on; collective.

        Raises:
            TrainingDivergedError: If `check` and one of them is not finite.
        """
        if not self._pending:
            return
        losses, norms = (torch.stack(each) for each in zip(*self._pending, strict=True))
        steps = range(self.step - len(losses) + 1, self.step + 1)
        means, seconds = self.ranks.mean(losses), self.timer.collect()[::2]
        untimed = min(WARMUP_STEPS, (self.config.last_step - self._first_step) // 2)
        peaks = self.ranks.gather(self.memory.read())
        memory = None if None in peaks else max(peaks)  # type: ignore[type-var]
        columns = (steps, means.tolist(), norms.tolist(), seconds)
        records = [
            StepRecord(
                step=step,
                loss=loss,
                grad_norm=norm,
                learning_rate=build.learning_rate(step, self.config),
                seconds=duration,
                tokens=self.config.tokens_per_step,
                timed=step - self._first_step > untimed,
                memory_bytes=memory,
            )
            for step, loss, norm, duration in zip(*columns, strict=True)
        ]
        self._pending = []
        self._tell("on_records", records)
        bad = next((record for record in records if not record.finite), None)
        if check and bad is not None:
            kept = self.last_checkpoint
            message = (
                f"training diverged at step {bad.step}: loss {bad.loss}, gradient norm "
                f"{bad.grad_norm}. The metrics are in {self.folder.metrics}"
                + (f", the last checkpoint is {kept}" if kept else "")
                + "; try a lower --learning-rate or a longer --warmup-steps"
            )
            raise for_all(TrainingDivergedError(message))

    def _save(self) -> None:
        if self._saved_step == self.step:
            return
        self._report(check=True)  # A run that has diverged must not replace good checkpoints.
        self.last_checkpoint = save_checkpoint(
            self.folder.checkpoints,
            self.step,
            self.state(),
            describe_run(self.config, self.corpus),
            keep=self.config.keep_checkpoints,
            ranks=self.ranks,
        )
        self._saved_step = self.step
        self._tell("on_checkpoint", self.last_checkpoint)

    def _tell(self, event: str, *values: object) -> None:
        for observer in self.observers:
            getattr(observer, event)(*values)


@dataclass(frozen=True)
class TrainResult:
    """How a run went."""

    status: str  # `"finished"`, `"interrupted"` (by a signal) or `"stopped"` (by `stop_after`)
    summary: metrics.Summary  # over all its parts if it was resumed
    folder: RunFolder  # where everything was written
    checkpoint: Path | None  # of the last step, None if none was asked for


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

    With `config.fsdp` or `config.tp` all ranks call it alike; the first writes and tells observers.

    Args:
        config: The settings.
        observers: Told what happens, besides the JSON lines and TensorBoard files.
        resume: A checkpoint, or the folder of a run whose newest one is meant.
        corpus: The data, if it is loaded already.
        stop: Ends the run after the step in which it is set on any rank, with a checkpoint.
        ranks: Who trains, if they have met already: see `join_ranks`.

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
        with join_ranks(config.spread) as met:
            return train(
                config, observers=observers, resume=resume, corpus=corpus, stop=stop, ranks=met
            )

    def usable() -> data.Corpus:
        ranks.check_fits(config.batch_size, config.hsdp, config.tp, config.fsdp)
        found = corpus if corpus is not None else data.load_corpus(config.data)
        data.check_length(found, config.seq_len, config.batch_size)
        _check_memory(config, ranks)
        return found

    text = ranks.together(usable)
    fingerprints = ranks.gather(text.fingerprint)
    for rank, other in enumerate(fingerprints):
        if other != fingerprints[0]:  # each takes its part of one order
            message = (
                f"rank {rank} reads other data than rank 0 (fingerprint {other} and not "
                f"{fingerprints[0]}): give a --data that is the same on all hosts"
            )
            raise for_all(DataError(message))
    checkpoint = None
    if resume is not None:
        checkpoint = ranks.once(lambda: find_checkpoint(resume))
        check_checkpoint(checkpoint, ranks)
    folder = ranks.once(lambda: open_run_folder(config, text, checkpoint=checkpoint))
    with explain_out_of_memory(
        f"{config.device} ran out of memory with batches of {config.batch_size} x "
        f"{config.seq_len} tokens: lower --batch-size (and raise --accumulate by as much), "
        "use --activation-checkpointing, or choose a smaller model"
    ):
        everyone: list[Observer] = []
        if ranks.rank == 0:
            everyone = [*observers, metrics.JsonLines(folder.metrics)]
            if config.tensorboard:
                start_step = read_state(checkpoint)["step"] if checkpoint else 0
                everyone.append(metrics.TensorBoard(folder.tensorboard, start_step))
        trainer = Trainer(config, text, everyone, ranks)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        if trainer.conversion and ranks.rank == 0:
            folder.conversion.write_text(trainer.conversion + "\n")
        status = trainer.run(stop or Event())
    summary = ranks.once(lambda: metrics.summarize(metrics.read_metrics(folder.metrics)))
    return TrainResult(status, summary, folder, trainer.last_checkpoint)


def _check_memory(config: TrainConfig, ranks: Ranks) -> None:
    """Refuse what cannot fit before it is tried: systems kill who asks for too much, unheard."""
    shared = 1 if config.sequence_parallel else config.tp  # ranks that have the same tokens
    shape = config.model_config()
    tokens = config.batch_size * config.seq_len * shared // ranks.size
    # Of a token at least: logits and their gradient in float32; in each block its input and, unless
    # it runs again, what is multiplied by SwiGLU, a byte each.
    block = shape.dim + (0 if config.activation_checkpointing else 2 * shape.ffn_dim)
    needed = tokens * (8 * shape.vocab_size + shape.n_layers * block)
    there = total_memory(torch.device(config.device))
    if needed > there:
        raise OutOfMemoryError(
            f"a batch of {config.batch_size} x {config.seq_len} tokens needs more than "
            f"{needed / 2**30:,.0f} GiB, but {config.device} has {there / 2**30:,.0f}: "
            "lower --batch-size (and raise --accumulate by as much)"
        )
