"""Checkpoints on disk: complete or not there at all.

A checkpoint is a folder `step_00000100` that `torch.distributed.checkpoint` (DCP) writes and reads:
every rank its shards, and on any number of ranks. It is written under a temporary name and then
renamed, so a folder with the final name was once complete; all ranks must see the same folder.

DCP reads pickles: resume only from checkpoints that you trust.
"""

import contextlib
import errno
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from float8_lab.errors import CheckpointError, ToldError
from float8_lab.ranks import ALONE, Ranks, explain_lost_rank

_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ".unfinished-"
_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))


def save_checkpoint(
    folder: Path, step: int, values: dict[str, Any], *, keep: int, ranks: Ranks = ALONE
) -> Path:
    """Write a checkpoint into `folder`, then delete the oldest beyond `keep`. Collective.

    `values` is what DCP saves: tensors, `Stateful` objects, dicts of both. Of a DTensor each rank
    writes its shards; the rest is equal on all ranks. If some rank could not write it, a
    `CheckpointError`, or a `RankFailedError` if that rank is gone; older ones stay.
    """
    target = folder / f"step_{step:08d}"
    temporary = folder / f"{_UNFINISHED}{target.name}"
    try:
        with _explained(f"could not write the checkpoint {target}", ranks):
            ranks.once(lambda: _delete(folder.glob(f"{_UNFINISHED}*")))
            save(values, storage_writer=_Writer(temporary), no_dist=ranks.size == 1)
            ranks.once(lambda: _delete([target]))  # reached again after resuming from an older step
            ranks.once(lambda: temporary.rename(target))
    except (CheckpointError, torch.OutOfMemoryError):
        _delete([temporary])
        raise
    if ranks.rank == 0:
        others = [path for path in list_checkpoints(folder) if path != target]
        _delete(others[::-1][keep - 1 :])
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


def _delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(path: Path, values: dict[str, Any], ranks: Ranks = ALONE) -> None:
    """Put what a checkpoint of any number of ranks holds into `values`, in place. Collective.

    A `CheckpointError` if names or shapes are not those of then, or if it is damaged.
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


def step_of(path: Path) -> int:
    """Optimizer steps that were done when a checkpoint was written."""
    return int(path.name.removeprefix("step_"))


@contextlib.contextmanager
def _explained(what: str, ranks: Ranks) -> Iterator[None]:
    """Turn what goes wrong into a `CheckpointError`."""
    try:
        with explain_lost_rank(), warnings.catch_warnings():
            # DCP warns that there is no process group although `no_dist=True` says so.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        first, cause = ranks.rank, cast(BaseException, error)
        # DCP wraps what goes wrong on some ranks in a BaseException of its own, on all ranks.
        if isinstance(error, CheckpointException) and error.failures:
            first, (cause, _) = min(error.failures.items())
        if first != ranks.rank:
            raise ToldError(f"rank {first} {what}: {cause}") from error
        if isinstance(cause, torch.OutOfMemoryError):  # whoever trains knows what to do about it
            raise cause from None
        message = f"{what}: {str(cause) or type(cause).__name__}"
        if any(words in message for words in _FULL):
            message += "; free some space on the disk, then go on with --resume: older ones stay"
        raise CheckpointError(message) from error
