"""Checkpoints on disk: complete or not there at all.

A checkpoint is a folder `step_00000100` that `torch.distributed.checkpoint` (DCP) writes and reads:
under a temporary name and then renamed, so a folder with the final name was once complete.
`checksums.json` in it has a CRC-32 of each file, which is compared before anything is loaded.

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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from float8_lab.errors import CheckpointError

_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ".unfinished-"
_METADATA, _CHECKSUMS = ".metadata", "checksums.json"
_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))


def save_checkpoint(folder: Path, step: int, values: dict[str, Any], *, keep: int) -> Path:
    """Write a checkpoint of `values`, as DCP saves them, then delete the oldest beyond `keep`.

    If it cannot be written, a `CheckpointError`; older ones stay.
    """
    target = folder / f"step_{step:08d}"
    temporary = folder / f"{_UNFINISHED}{target.name}"
    try:
        with _explained(f"could not write the checkpoint {target}"):
            _delete(folder.glob(f"{_UNFINISHED}*"))
            save(values, checkpoint_id=temporary, no_dist=True)
            checksums = {x.name: _crc(x) for x in temporary.iterdir()}
            (temporary / _CHECKSUMS).write_text(json.dumps(checksums, indent=1) + "\n")
            _delete([target])  # reached again after resuming from an older step
            temporary.rename(target)
    except (CheckpointError, torch.OutOfMemoryError):
        _delete([temporary])
        raise
    others = [path for path in list_checkpoints(folder) if path != target]
    _delete(others[::-1][keep - 1 :])
    return target


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def check_checkpoint(path: Path) -> None:
    """Raise a `CheckpointError` that names an intact one if a file is damaged or missing."""
    if damage := _damage(path):
        do = "no other checkpoint of the run is intact: begin it anew with another --output"
        for other in list_checkpoints(path.parent):
            if other.name != path.name and _damage(other) is None:
                do = f"go on from the last good one with float8 train --resume {other}"
        raise CheckpointError(f"the checkpoint {path} is damaged: {damage}; {do}")


def _damage(path: Path) -> str | None:
    """Say which of the files is not as it was written; None if all are."""
    name = _CHECKSUMS
    try:
        listed = {_METADATA: None, **json.loads((path / name).read_text())}
        if unlisted := {x.name for x in path.glob("*.distcp")}.difference(listed):
            return f"{min(unlisted)} is not in {_CHECKSUMS}"
        for name in listed:
            if _crc(path / name) != listed[name]:
                return f"{name} has other bytes than were written"
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return f"{name} cannot be read: {error}"
    return None


def _delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(path: Path, values: dict[str, Any]) -> None:
    """Put what a checkpoint holds into `values`, in place.

    A `CheckpointError` if names or shapes are not those of then. `check_checkpoint` comes first.
    """
    with _explained(f"could not go on from the checkpoint {path}"):
        load(values, checkpoint_id=path, no_dist=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints below `folder`, oldest step first; unfinished ones are not among them."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if is_checkpoint(path)), key=step_of)


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is named like a checkpoint's folder; it may still be damaged."""
    return path.is_dir() and _NAME.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """Optimizer steps that were done when a checkpoint was written."""
    return int(path.name.removeprefix("step_"))


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what goes wrong into a `CheckpointError`."""
    try:
        with warnings.catch_warnings():
            # DCP warns that there is no process group although `no_dist=True` says so.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        cause: BaseException = error
        # DCP wraps what goes wrong in a BaseException of its own.
        if isinstance(error, CheckpointException) and error.failures:
            cause, _ = error.failures[0]
        if isinstance(cause, RuntimeError) and isinstance(cause.__context__, OSError):
            cause = cause.__context__  # of the file, which torch's own words hide
        if isinstance(cause, torch.OutOfMemoryError):  # whoever trains knows what to do about it
            raise cause from None
        message = f"{what}: {str(cause) or type(cause).__name__}"
        if any(words in message for words in _FULL):
            message += "; free some space on the disk, then go on with --resume: older ones stay"
        raise CheckpointError(message) from error
