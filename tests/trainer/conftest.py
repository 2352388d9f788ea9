import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import support.trainer  # noqa: F401 - its models
from float8_lab.trainer import loop
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.data import Corpus, load_corpus


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(12):
        lines = [
            f"line {j} of file {i}: {i * j % 7} apples and {(i + j) % 5} pears" for j in range(40)
        ]
        (folder / f"chapter{i:02d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def corpus(text_folder: Path) -> Corpus:
    return load_corpus(text_folder)


@pytest.fixture
def make_config(tmp_path: Path, text_folder: Path) -> Callable[..., TrainConfig]:
    """Of a small run in high precision, but for other settings."""
    small: dict[str, Any] = {"data": str(text_folder), "output": str(tmp_path / "run")}
    small |= {"model": "nano", "recipe": "high_precision", "device": "cpu"}
    small |= {"tensorboard": False, "eval_batches": 2, "log_interval": 2}
    return lambda **settings: TrainConfig.create(**(small | settings))


@pytest.fixture
def nan_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have the trainer's call of this number, from now on, compute a loss that is NaN."""

    def at(number: int) -> None:
        plain, calls = loop.F.cross_entropy, itertools.count(1)

        def poisoned(*args: Tensor) -> Tensor:
            return plain(*args) * (math.nan if next(calls) == number else 1.0)

        monkeypatch.setattr(loop.F, "cross_entropy", poisoned)

    return at
