from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
import torch

from float8_lab.errors import CheckpointError
from float8_lab.trainer.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from float8_lab.trainer.run_folder import find_checkpoint


def tensors() -> dict[str, torch.Tensor]:
    return {
        "model/a": torch.randn(5, 7),
        "model/scalar": torch.tensor(3.5),
        "model/half": torch.randn(4).bfloat16(),
        "rng/cpu": torch.get_rng_state(),
    }


def save(folder: Path, step: int, keep: int = 5) -> Path:
    return save_checkpoint(folder, step, tensors(), keep=keep)


def test_a_disk_that_fills_up_leaves_the_others(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))  # a write ends in the middle
    try:
        with pytest.raises(CheckpointError, match=r"could not write .*step_00000002: .*too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == [first]


def test_an_unfinished_one_is_not_seen_and_cleared(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    leftover = tmp_path / ".unfinished-step_00000002"
    leftover.mkdir()
    (leftover / "half").write_text("x")
    assert list_checkpoints(tmp_path) == [first]
    second = save(tmp_path, 2)
    assert not leftover.exists()
    assert list_checkpoints(tmp_path) == [first, second]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("rest", [None, 100])
def test_damage_is_named(tmp_path: Path, name: str, rest: int | None) -> None:
    path = save(tmp_path, 1)
    if rest is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes((path / name).read_bytes()[:rest])
    with pytest.raises(CheckpointError, match=r"go on from the checkpoint .*step_00000001: \S"):
        load_checkpoint(path, tensors())


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="nothing to resume at"):
        find_checkpoint(tmp_path / "missing")
