"""Checkpoints on disk: complete or not there at all, and checked before they are used.

A checkpoint is a folder `step_00000100` with the tensors (`data/`, written by
`torch.distributed.checkpoint`), what else the run needs (`state.json`), and the size and CRC-32
of every file (`manifest.json`). It is written under a temporary name, flushed to disk and then
renamed, so a folder with the final name was once complete. One that no longer matches its
manifest is refused by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from float8.trainer.errors import CheckpointError

_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY_PREFIX = ".unfinished-"
_MANIFEST = "manifest.json"
_STATE = "state.json"
_DATA = "data"
_CHUNK_BYTES = 1 << 23


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], *, keep: int
) -> Path:
    """Write a checkpoint, then delete the oldest ones beyond `keep`.

    Args:
        folder: Folder of all the run's checkpoints; made if missing.
        step: Optimizer steps done.
        tensors: Flat dict of tensors.
        state: JSON-ready values.
        keep: How many checkpoints stay, the new one included.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: If it could not be written (disk full, no permission); older ones stay.
    """
    target = folder / f"step_{step:08d}"
    temporary = folder / f"{_TEMPORARY_PREFIX}{target.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"{_TEMPORARY_PREFIX}*"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        with _one_process():
            save(dict(tensors), checkpoint_id=temporary / _DATA, no_dist=True)
        _write_json(temporary / _STATE, {"step": step, **state})
        manifest = {name: list(_measure(temporary / name)) for name in _files(temporary)}
        _write_json(temporary / _MANIFEST, manifest)
        _flush_folder(temporary / _DATA)
        _flush_folder(temporary)
        if target.exists():  # Reached again after resuming from an older step.
            shutil.rmtree(target)
        temporary.rename(target)
        _flush_folder(folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"could not write the checkpoint {target}: {error}") from error
    others = [path for path in list_checkpoints(folder) if path != target]
    for path in others[: max(len(others) - (keep - 1), 0)]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints below `folder`, oldest step first; unfinished ones are not among them."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is named like a checkpoint's folder; it may still be damaged."""
    return path.is_dir() and _NAME.fullmatch(path.name) is not None


def check_checkpoint(path: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: Naming the checkpoint, what is wrong, and which older one is intact.
    """
    if damage := _find_damage(path):
        older = [other for other in list_checkpoints(path.parent) if _step(other) < _step(path)]
        intact = next((other for other in reversed(older) if not _find_damage(other)), None)
        advice = (
            f"the newest intact older one is {intact}: resume from that"
            if intact
            else "there is no intact older one: start the run again"
        )
        raise CheckpointError(f"the checkpoint {path} is damaged ({damage}); {advice}")


def read_state(path: Path) -> dict[str, Any]:
    """The JSON values of a checkpoint that passed `check_checkpoint`, `step` among them."""
    with _readable(path):
        state: dict[str, Any] = json.loads((path / _STATE).read_text())
        return state


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint that passed `check_checkpoint`, on the CPU."""
    with _readable(path):
        metadata = FileSystemReader(path / _DATA).read_metadata()
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                dtype = entry.properties.dtype
                tensors[name] = torch.empty(entry.size, dtype=dtype)
        with _one_process():
            load(tensors, checkpoint_id=path / _DATA, no_dist=True)
        return tensors


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Without it, torch warns that there is no process group although `no_dist=True` says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    # torch.distributed.checkpoint wraps what goes wrong in a BaseException of its own.
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(f"could not read the checkpoint {path}: {error}") from error


def _find_damage(path: Path) -> str | None:
    try:
        manifest: dict[str, list[int]] = json.loads((path / _MANIFEST).read_text())
        for name, (size, checksum) in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if _measure(file)[1] != checksum:
                return f"the contents of {name} have changed"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{_MANIFEST} is not readable: {error}"
    return None


def _files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def _measure(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return size, checksum


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _write_json(path: Path, value: Any) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
