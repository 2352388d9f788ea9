"""The lab's trainer: the smallest Llamas, its checkpoints without it, what observers hear, a clock.

The Llamas are known to it as `nano` and `nano-tied`.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten_with_path

from float8_lab.models.presets import PRESETS, ModelConfig, Preset
from float8_lab.trainer.metrics import StepRecord

NANO = Preset(
    ModelConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=64),
    seq_len=16,
    batch_size=4,
    learning_rate=5e-3,
    steps=6,
)
TIED = replace(NANO.model, tied_head=True, vocab_size=259, n_layers=2)
PRESETS |= {"nano": NANO, "nano-tied": replace(NANO, model=TIED)}


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors, whole and on the CPU, by names like `model/norm.weight`."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(checkpoint, whole)
        found, _ = tree_flatten_with_path(torch.load(whole))
    return {"/".join(key.key for key in path): tensor for path, tensor in found}


class Listener:
    """Writes down what it is told of a run, and can act on a step."""

    def __init__(self, act: Callable[[int], None] = lambda step: None) -> None:
        self.events: list[str] = []
        self.records: list[StepRecord] = []
        self._act = act

    def on_step(self, step: int) -> None:
        self._act(step)

    def on_records(self, records: Sequence[StepRecord]) -> None:
        self.records += records
        self.events.append(f"records to {records[-1].step}")

    def on_validation(self, record: object) -> None:
        self.events.append("validation")

    def on_checkpoint(self, path: Path) -> None:
        self.events.append(f"checkpoint {int(path.name[5:])}")

    def on_end(self, status: str, step: int) -> None:
        self.events.append(f"{status} {step}")


def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stop `time.perf_counter`; returns what takes the place of `time.sleep`."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    return sleep
