"""Checkpoints on disk: complete or not there at all, and checked before they are used.

A checkpoint is a folder `step_00000100` that `torch.distributed.checkpoint` (DCP) writes and reads:
every rank its shards, and on any number of ranks. Besides DCP's files it has `checksums.json`, the
CRC-32 of every other file, since neither DCP nor `torch.load` notices a flipped bit. It is written
under a temporary name and then renamed, so a folder with the final name was once complete; all
ranks must see the same folder.

DCP reads pickles: resume only from checkpoints that you trust.
"""

import contextlib
import errno
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from float8_lab.errors import CheckpointError, ToldError
from float8_lab.ranks import ALONE, Ranks, explain_lost_rank, for_all

_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ".unfinished-"
_CHECKSUMS = "checksums.json"
_CHUNK_BYTES = 1 << 23
_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))


def save_checkpoint(
    folder: Path,
    step: int,
    values: dict[str, Any],
    *,
    keep: int,
    ranks: Ranks = ALONE,
) -> Path:
    """Write a checkpoint, then delete the oldest ones beyond `keep`. Collective over `ranks`.

    Args:
        folder: Folder of all the run's checkpoints; made if missing.
        step: Optimizer steps done.
        values: What DCP saves: tensors, `Stateful` objects, dicts of both. Of a DTensor each rank
            writes its shards; the rest is equal on all ranks.
        keep: How many checkpoints stay, the new one included.
        ranks: Who writes it.

    Raises:
        CheckpointError: If some rank could not write it; older ones stay. A rank that cannot say
            what it has to write raises it alone.
        RankFailedError: If a rank ended meanwhile; older ones stay, and an unfinished one.
    """
    target = folder / f"step_{step:08d}"
    temporary = folder / f"{_UNFINISHED}{target.name}"
    try:
        with _explained(f"could not write the checkpoint {target}", ranks):
            ranks.once(lambda: _make_room(temporary))
            save(values, storage_writer=_Writer(temporary), no_dist=ranks.size == 1)
            # One list for all: what a shared folder shows may come late to some.
            paths = ranks.once(lambda: list(temporary.iterdir()))[ranks.rank :: ranks.size]
            mine = ranks.together(lambda: {path.name: _checksum(path) for path in paths})
            checksums = {k: v for part in ranks.gather(mine) for k, v in part.items()}
            ranks.once(lambda: _put_in_place(temporary, target, checksums))
    except (CheckpointError, torch.OutOfMemoryError):
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if ranks.rank == 0:
        others = [path for path in list_checkpoints(folder) if path != target]
        for path in others[::-1][keep - 1 :]:
            shutil.rmtree(path, ignore_errors=True)
    return target


class _Writer(FileSystemWriter):
    """DCP's, which raises what went wrong with the file: torch's own words on top hide it.

    Here, since an error that is sent to other ranks comes without its context.
    """

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _make_room(temporary: Path) -> None:
    for leftover in temporary.parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)
    temporary.mkdir(parents=True)


def _put_in_place(temporary: Path, target: Path, checksums: dict[str, int]) -> None:
    (temporary / _CHECKSUMS).write_text(json.dumps(checksums, indent=1))
    if target.exists():  # Reached again after resuming from an older step.
        shutil.rmtree(target)
    temporary.rename(target)


def load_checkpoint(path: Path, values: dict[str, Any], ranks: Ranks = ALONE) -> None:
    """Put what a checkpoint holds into `values`, in place. Collective over `ranks`.

    It passed `check_checkpoint`, and was written by any number of ranks: names and shapes must be
    the same as then (a `CheckpointError`), shards may differ.
    """
    with _explained(f"could not go on from the checkpoint {path}", ranks):
        load(values, checkpoint_id=path, no_dist=ranks.size == 1)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints below `folder`, oldest step first; unfinished ones are not among them."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if is_checkpoint(path)), key=step_of)


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is named like a checkpoint's folder; it may still be damaged."""
    return path.is_dir() and _NAME.fullmatch(path.name) is not None


def check_checkpoint(path: Path, ranks: Ranks = ALONE) -> None:
    """Compare every file of a checkpoint with its checksum; each of `ranks` reads a part of them.

    A `CheckpointError` names the checkpoint, what is wrong, and which older one is intact.
    """
    damage = next(filter(None, ranks.gather(_find_damage(path, ranks))), None)
    if damage is None:
        return
    older = [other for other in list_checkpoints(path.parent) if step_of(other) < step_of(path)]
    intact = next((other for other in older[::-1] if not _find_damage(other)), None)
    advice = "there is no intact older one: start the run again"
    if intact:
        advice = f"the newest intact older one is {intact}: resume from that"
    raise for_all(CheckpointError(f"the checkpoint {path} is damaged ({damage}); {advice}"))


def step_of(path: Path) -> int:
    """Optimizer steps that were done when a checkpoint was written."""
    return int(path.name.removeprefix("step_"))


def _find_damage(path: Path, ranks: Ranks = ALONE) -> str | None:
    """Say what is wrong with the files that are this rank's to check; None if nothing is."""
    name = _CHECKSUMS
    try:
        wanted: dict[str, int] = json.loads((path / _CHECKSUMS).read_text())
        for name in list(wanted)[ranks.rank :: ranks.size]:
            if _checksum(path / name) != wanted[name]:
                return f"the contents of {name} have changed"
    except (OSError, ValueError, TypeError) as error:
        return f"{name} is not readable: {error}"
    return None


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


@contextlib.contextmanager
def _explained(what: str, ranks: Ranks) -> Iterator[None]:
    """Turn what goes wrong into a `CheckpointError`."""
    try:
        with explain_lost_rank(), warnings.catch_warnings():
            # DCP warns that there is no process group although `no_dist=True` says so.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        cause: BaseException = error
        # DCP wraps what goes wrong on some ranks in a BaseException of its own, on all ranks.
        if isinstance(error, CheckpointException) and error.failures:
            first = min(error.failures)
            cause = error.failures[first][0]
            if first != ranks.rank:
                raise ToldError(f"rank {first} {what}: {cause}") from error
        if isinstance(cause, torch.OutOfMemoryError):  # whoever trains knows what to do about it
            raise cause from (None if cause is error else error)
        message = f"{what}: {str(cause) or type(cause).__name__}"
        if any(words in message for words in _FULL):
            message += "; free some space on the disk, then go on with --resume: older ones stay"
        raise CheckpointError(message) from error
