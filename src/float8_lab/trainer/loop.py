"""One training run, from settings to its result: steps, validation, checkpoints, observers."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from float8 import attach_to_optimizer
from float8_lab.device import Clock, explain_out_of_memory, use_device
from float8_lab.errors import ConfigError, FailedError
from float8_lab.trainer import build, data, metrics
from float8_lab.trainer import checkpoint as checkpoints
from float8_lab.trainer.config import TrainConfig, check_alone
from float8_lab.trainer.metrics import StepRecord, ValidationRecord
from float8_lab.trainer.run_folder import RunFolder, open_run_folder

WARMUP_STEPS = 10  # Not counted for throughput: compilation, allocator, clocks.


class Trainer:
    """A run under way: model, optimizer, and how many steps are done."""

    def __init__(
        self, config: TrainConfig, corpus: data.Corpus, observers: Sequence[Any] = ()
    ) -> None:
        check_alone()
        self.config = config
        self.corpus = corpus
        self.folder = RunFolder(config.output)
        self.observers = observers
        self.device = use_device(config.device)
        if config.threads and self.device.type == "cpu":
            torch.set_num_threads(config.threads)
        self.timer = Clock(self.device)
        self.step = 0
        self.status = ""  # of `metrics`, once it has ended
        self.last_checkpoint: Path | None = None
        self.model, self.conversion = build.build_model(config, self.device)
        self.optimizer = build.build_optimizer(self.model, config)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._first_step = 0
        self._sizes = {"batch_size": config.batch_size, "seq_len": config.seq_len}
        self._pending: list[tuple[Tensor, Tensor]] = []  # Loss and norm, still on the device.

    def restore(self, checkpoint: Path) -> None:
        """Go back to where `checkpoint` was written."""
        self.step = self._first_step = checkpoints.step_of(checkpoint)
        checkpoints.load_checkpoint(checkpoint, self.state())
        self.last_checkpoint = checkpoint

    def state(self) -> dict[str, Any]:
        """Return the contents of a checkpoint, to save or to load into. Training is not random.

        Of the optimizer the state by names of parameters; before the first step there is none.
        """
        if not self.step:
            return {"model": self.model}
        state = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        return {"model": self.model, "optimizer": state}

    def run(self, stop: Event) -> None:
        """Train until the last step, a request to stop, or `stop_after`: `status` says which."""
        config = self.config
        self.model.train()
        # Not earlier: restoring takes a step to make the optimizer's state.
        attach_to_optimizer(self.model, self.optimizer)
        try:
            self._tell("on_start", config, self.step, self._about())
            while self.step < config.last_step and not stop.is_set():
                self.train_step()
                self._tell("on_step", self.step)
                if self._due(config.log_interval):
                    self._report()
                if self._due(config.eval_interval) or self.step == config.steps:
                    self._report()
                    loss = self.validate()
                    self._tell("on_validation", ValidationRecord(self.step, loss))
                    self._require_finite(math.isfinite(loss), self.step, f"validation loss {loss}")
                if self._due(config.checkpoint_interval):
                    self._save()
            self._report()
            self.status = metrics.FINISHED
            if self.step < config.steps:
                self.status = metrics.INTERRUPTED if stop.is_set() else metrics.STOPPED
            if config.final_checkpoint or self.step < config.steps:
                self._save()
        except BaseException:
            # Whatever happened, the steps that were done go on record.
            with contextlib.suppress(Exception):
                self._report()
            with contextlib.suppress(Exception):
                self._tell("on_end", metrics.FAILED, self.step)
            raise
        self._tell("on_end", self.status, self.step)

    def _about(self) -> str:
        """Describe model and data for people."""
        config, corpus = self.config, self.corpus
        size = sum(parameter.numel() for parameter in self.model.parameters())
        about = f"{config.recipe}: Llama {config.model}, {size / 1e6:.1f}M parameters"
        about += f", {config.dtype}{', compiled' * config.compile} on {config.device}"
        if self.device.type == "cpu":
            about += f" with {torch.get_num_threads()} thread(s)"
            about += "\n  the first step compiles C++ for a minute or two" * config.compile
        data = f"data: {corpus.name}, {len(corpus.train) / 1e6:.1f} MB in "
        data += f"{corpus.train_files} file(s), {config.tokens_per_step:,} tokens per step"
        return "\n  ".join([about, data, *self.conversion.splitlines()[:1]])

    def train_step(self) -> None:
        """Forward, backward and optimizer, without waiting for the device."""
        config, step = self.config, self.step + 1
        self.timer.mark()
        for group in self.optimizer.param_groups:
            group["lr"] = build.learning_rate(step, config)
        loss = torch.zeros((), device=self.device)
        for index in range((step - 1) * config.accumulate, step * config.accumulate):
            settings = {"seed": config.seed, "first": index * config.batch_size, **self._sizes}
            batch = data.train_batch(self.corpus.train, **settings)
            part = self.loss(batch) / config.accumulate
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        limit = config.grad_clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)  # before clipping
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.timer.mark()
        self._pending.append((loss, norm))
        self.step = step

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def loss(self, batch: Tensor) -> Tensor:
        """Mean loss of a batch [batch, seq + 1] uint8 from the CPU, nats per byte."""
        if self.device.type == "cuda":
            batch = batch.pin_memory().to(self.device, non_blocking=True)
        tokens = batch.long()
        low = getattr(torch, self.config.dtype) if self.config.dtype != "float32" else None
        with torch.autocast(self.device.type, dtype=low, enabled=low is not None):
            logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the validation batches, nats per byte."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        settings = {"batches": self.config.eval_batches, **self._sizes}
        for batch in data.validation_batches(self.corpus.validation, **settings):
            total += self.loss(batch)
        self.model.train()
        return total.item() / self.config.eval_batches

    def _report(self) -> None:
        """Pass on the losses since the last time; a `FailedError` if bad."""
        if not self._pending:
            return
        config = self.config
        losses, norms = (torch.stack(each) for each in zip(*self._pending, strict=True))
        steps = range(self.step - len(losses) + 1, self.step + 1)
        seconds = self.timer.collect()[::2]
        untimed = min(WARMUP_STEPS, (config.last_step - self._first_step) // 2)
        gpu, records = self.device.type == "cuda", list[StepRecord]()
        memory = torch.cuda.max_memory_allocated(self.device) if gpu else None
        done = zip(steps, losses.tolist(), norms.tolist(), seconds, strict=True)
        for step, loss, norm, duration in done:
            rate, timed = build.learning_rate(step, config), step - self._first_step > untimed
            rest = duration, config.tokens_per_step, timed, memory
            records.append(StepRecord(step, loss, norm, rate, *rest))
        self._pending.clear()
        self._tell("on_records", records)
        for x in records:
            finite = math.isfinite(x.loss) and math.isfinite(x.grad_norm)
            self._require_finite(finite, x.step, f"loss {x.loss}, gradient norm {x.grad_norm}")

    def _require_finite(self, finite: bool, step: int, what: str) -> None:
        """Raise a `FailedError` if the run cannot go on from there."""
        if not finite:
            saved = f", the last checkpoint is {self.last_checkpoint}" * bool(self.last_checkpoint)
            where = f"The metrics are in {self.folder.metrics}{saved}"
            do = "try a lower --learning-rate or a longer --warmup-steps"
            raise FailedError(f"training diverged at step {step}: {what}. {where}; {do}")

    def _save(self) -> None:
        if self.last_checkpoint and checkpoints.step_of(self.last_checkpoint) == self.step:
            return
        self._report()  # A run that has diverged must not replace good checkpoints.
        largest = nn.utils.get_total_norm(self.model.parameters(), math.inf).item()
        self._require_finite(math.isfinite(largest), self.step, f"a weight is {largest} after it")
        where, keep = (self.folder.checkpoints, self.step), self.config.keep_checkpoints
        self.last_checkpoint = checkpoints.save_checkpoint(*where, self.state(), keep=keep)
        self._tell("on_checkpoint", self.last_checkpoint)

    def _tell(self, event: str, *values: object) -> None:
        for observer in self.observers:
            getattr(observer, event, lambda *_: None)(*values)


def train(
    config: TrainConfig,
    *,
    observers: Sequence[Any] = (),
    resume: Path | None = None,
    corpus: data.Corpus | None = None,
    stop: Event | None = None,
) -> Trainer:
    """Train a Llama as `config` says, maybe from a checkpoint on; returns the run as it ended.

    The run ends with a checkpoint after the step in which `stop` is set. It tells `observers`, and
    leaves everything in `config.output`.
    """
    check_alone()
    text = corpus if corpus is not None else data.load_corpus(config.data)
    data.check_length(text, config.seq_len, config.batch_size)
    if resume is not None:
        checkpoints.check_checkpoint(resume)
        last, output = config.last_step, Path(config.output)
        moved = output.resolve() != resume.resolve().parent.parent
        if moved and checkpoints.step_of(resume) >= last:
            got = f"--output: got {output} for a run that ended after step {last}"
            raise ConfigError(f"{got}: give more --steps to go on, or leave --output out")
    folder = open_run_folder(config, text, checkpoint=resume)
    batch = f"{config.device} ran out of memory with batches of {config.batch_size} x "
    do = "lower --batch-size (and raise --accumulate by as much), or choose a smaller model"
    with explain_out_of_memory(f"{batch}{config.seq_len} tokens: {do}"):
        everyone = [*observers, metrics.JsonLines(folder.metrics)]
        if config.tensorboard:
            step = checkpoints.step_of(resume) if resume else 0
            everyone.append(metrics.TensorBoard(folder.tensorboard, step))
        trainer = Trainer(config, text, everyone)
        if resume is not None:
            trainer.restore(resume)
        if trainer.conversion:
            folder.conversion.write_text(trainer.conversion + "\n")
        trainer.run(stop or Event())
    return trainer
