from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
import torch

from float8_lab.errors import CheckpointError
from float8_lab.trainer import checkpoint
from float8_lab.trainer.checkpoint import (
    check_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    step_of,
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


def largest_file(path: Path) -> Path:
    return max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def test_round_trip(tmp_path: Path) -> None:
    saved = tensors()
    path = save_checkpoint(tmp_path, 7, saved, keep=1)
    check_checkpoint(path)
    assert step_of(path) == 7
    back = {name: torch.zeros_like(value) for name, value in saved.items()}
    load_checkpoint(path, back)
    for name, value in saved.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value), name


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
    check_checkpoint(first)


def test_an_unfinished_one_is_not_seen_and_cleared(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    leftover = tmp_path / ".unfinished-step_00000002"
    leftover.mkdir()
    (leftover / "half").write_text("x")
    assert list_checkpoints(tmp_path) == [first]
    second = save(tmp_path, 2)
    assert not leftover.exists()
    assert list_checkpoints(tmp_path) == [first, second]


def test_a_second_ctrl_c_while_saving_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save(tmp_path, 1)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    plain = checkpoint.save

    def late(*args: object, **options: object) -> None:
        monkeypatch.setattr("os.fsync", interrupted)
        plain(*args, **options)

    monkeypatch.setattr(checkpoint, "save", late)
    with pytest.raises(CheckpointError, match=r"step_00000002: KeyboardInterrupt"):
        save(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [first]


def truncate(path: Path) -> None:
    with largest_file(path).open("r+b") as file:
        file.truncate(100)


def flip_a_bit(path: Path) -> None:
    content = bytearray(largest_file(path).read_bytes())
    content[len(content) // 2] ^= 1
    largest_file(path).write_bytes(content)


def lose_a_file(path: Path) -> None:
    largest_file(path).unlink()


def empty_checksums(path: Path) -> None:
    (path / "checksums.json").write_text("")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "the contents of __0_0.distcp have changed"),
        (flip_a_bit, "the contents of __0_0.distcp have changed"),
        (lose_a_file, "__0_0.distcp is not readable: [Errno 2] No such file"),
        (empty_checksums, "checksums.json is not readable"),
    ],
)
def test_damage_is_named_with_the_way_out(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    good, bad, newest = (save(tmp_path / "checkpoints", step) for step in (1, 2, 3))
    damage(newest)
    damage(bad)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(find_checkpoint(tmp_path))
    text = str(caught.value)
    assert f"{newest} is damaged" in text
    assert message in text
    assert f"the newest intact older one is {good}" in text
    check_checkpoint(good)
    damage(good)
    with pytest.raises(CheckpointError, match="no intact older one"):
        check_checkpoint(newest)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="nothing to resume at"):
        find_checkpoint(tmp_path / "missing")
