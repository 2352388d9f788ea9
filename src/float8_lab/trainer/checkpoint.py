"""Checkpoints on disk: complete or not there at all, and checked before they are used.

A checkpoint is a folder `step_00000100` with the tensors (`data/`, written by
`torch.distributed.checkpoint`), what else the run needs (`state.json`), and the size and CRC-32
of every file (`manifest.json`). It is written under a temporary name, flushed to disk and then
renamed, so a folder with the final name was once complete. One that no longer matches its
manifest is refused by name.

Several ranks each write their shards, in a folder that all of them see; the first one does the
rest, once they are done. What they wrote is read on any number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from float8_lab.trainer.errors import CheckpointError, OtherRankError, TrainerError
from float8_lab.trainer.ranks import ALONE, Ranks, explain_lost_rank

_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY_PREFIX = ".unfinished-"
_MANIFEST = "manifest.json"
_STATE = "state.json"
_DATA = "data"
_CHUNK_BYTES = 1 << 23


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    *,
    keep: int,
    ranks: Ranks = ALONE,
) -> Path:
    """Write a checkpoint, then delete the oldest ones beyond `keep`. Collective over `ranks`.

    Args:
        folder: Folder of all the run's checkpoints; made if missing.
        step: Optimizer steps done.
        tensors: Flat dict of tensors: DTensors, of which each rank writes its shards, and others,
            which are equal on all ranks.
        state: JSON-ready values.
        keep: How many checkpoints stay, the new one included.
        ranks: Who writes it.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: If it could not be written on some rank (disk full, no permission); older
            ones stay.
        OtherRankError: On the ranks that were not the first to fail.
        LostRankError: If a rank ended meanwhile; older ones stay, and an unfinished one.
    """
    target = folder / f"step_{step:08d}"
    temporary = folder / f"{_TEMPORARY_PREFIX}{target.name}"
    try:
        with explain_lost_rank():
            ranks.once(lambda: _make_room(temporary))
            with _one_process():
                save(dict(tensors), checkpoint_id=temporary / _DATA, no_dist=ranks.size == 1)
            _write_rest(temporary, {"step": step, **state}, ranks)
            ranks.once(lambda: _put_in_place(temporary, target))
    except (OSError, RuntimeError, CheckpointException) as error:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise _explained(f"could not write the checkpoint {target}", error, ranks) from error
    if ranks.is_first:
        others = [path for path in list_checkpoints(folder) if path != target]
        for path in others[: max(len(others) - (keep - 1), 0)]:
            shutil.rmtree(path, ignore_errors=True)
    return target


def _make_room(temporary: Path) -> None:
    folder = temporary.parent
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(leftover)
    temporary.mkdir()


def _write_rest(temporary: Path, state: dict[str, Any], ranks: Ranks) -> None:
    """State and manifest, for which each rank reads a part of the files once more."""
    ranks.once(lambda: _write_json(temporary / _STATE, state))
    # One list for all: what a shared folder shows may come late to some.
    mine = ranks.once(lambda: _files(temporary))[ranks.rank :: ranks.size]
    parts = ranks.gather(
        ranks.together(lambda: {name: list(_measure(temporary / name)) for name in mine})
    )
    manifest = {name: measured for part in parts for name, measured in part.items()}
    ranks.once(lambda: _write_json(temporary / _MANIFEST, dict(sorted(manifest.items()))))


def _put_in_place(temporary: Path, target: Path) -> None:
    _flush_folder(temporary / _DATA)
    _flush_folder(temporary)
    if target.exists():  # Reached again after resuming from an older step.
        shutil.rmtree(target)
    temporary.rename(target)
    _flush_folder(target.parent)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints below `folder`, oldest step first; unfinished ones are not among them."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is named like a checkpoint's folder; it may still be damaged."""
    return path.is_dir() and _NAME.fullmatch(path.name) is not None


def check_checkpoint(path: Path, ranks: Ranks = ALONE) -> None:
    """Compare every file of a checkpoint with its manifest; each rank reads a part of them.

    Collective over `ranks`.

    Raises:
        CheckpointError: Naming the checkpoint, what is wrong, and which older one is intact; on the
            first rank.
        OtherRankError: On the other ranks.
    """
    damages = ranks.gather(_find_damage(path, ranks))
    if damage := next(filter(None, damages), None):
        ranks.once(lambda: _refuse(path, damage))


def _refuse(path: Path, damage: str) -> NoReturn:
    older = [other for other in list_checkpoints(path.parent) if _step(other) < _step(path)]
    intact = next((other for other in reversed(older) if not _find_damage(other)), None)
    advice = (
        f"the newest intact older one is {intact}: resume from that"
        if intact
        else "there is no intact older one: start the run again"
    )
    raise CheckpointError(f"the checkpoint {path} is damaged ({damage}); {advice}")


def read_state(path: Path) -> dict[str, Any]:
    """The JSON values of a checkpoint, `step` among them.

    Raises:
        CheckpointError: If they cannot be read; as `check_checkpoint`, which sees more.
    """
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text())
    except (OSError, ValueError) as error:
        _refuse(path, f"{_STATE} is not readable: {error}")
    return state


def read_tensors(
    path: Path,
    empty: Callable[[str, torch.Size, torch.dtype], Tensor] | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Tensor]:
    """All tensors of a checkpoint that passed `check_checkpoint`. Collective over `ranks`.

    Args:
        path: The checkpoint, written by any number of ranks.
        empty: Given name, shape and dtype, makes the tensor to read into: a DTensor for those of
            which each rank needs its shards only. None: whole tensors on the CPU.
        ranks: Who reads.

    Raises:
        CheckpointError: If it could not be read.
        OtherRankError: On the ranks that were not the first to fail.
    """
    with _readable(path, ranks), explain_lost_rank():
        metadata = FileSystemReader(path / _DATA).read_metadata()
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                dtype = entry.properties.dtype
                if empty is None:
                    tensors[name] = torch.empty(entry.size, dtype=dtype)
                else:
                    tensors[name] = empty(name, entry.size, dtype)
        with _one_process():
            load(tensors, checkpoint_id=path / _DATA, no_dist=ranks.size == 1)
        return tensors


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Without it, torch warns that there is no process group although `no_dist=True` says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextlib.contextmanager
def _readable(path: Path, ranks: Ranks = ALONE) -> Iterator[None]:
    try:
        yield
    # torch.distributed.checkpoint wraps what goes wrong in a BaseException of its own.
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        raise _explained(f"could not read the checkpoint {path}", error, ranks) from error


def _explained(what: str, error: BaseException, ranks: Ranks) -> TrainerError:
    """What to raise for an error, which is told by the first rank that met it."""
    if isinstance(error, CheckpointException) and error.failures:
        first = min(error.failures)
        if ranks.rank != first:
            return OtherRankError(f"rank {first} failed, and said why")
        return CheckpointError(f"{what}: {error.failures[first][0]}")
    return CheckpointError(f"{what}: {error}")


def _find_damage(path: Path, ranks: Ranks = ALONE) -> str | None:
    """What is wrong with the files that are this rank's to check."""
    try:
        manifest: dict[str, list[int]] = json.loads((path / _MANIFEST).read_text())
        for name, (size, checksum) in list(manifest.items())[ranks.rank :: ranks.size]:
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
