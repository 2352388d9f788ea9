"""Checkpoints on disk: complete or not there at all, and checked before they are used.

A checkpoint is a folder `step_00000100` that `torch.distributed.checkpoint` (DCP) writes and reads:
every rank its shards, and on any number of ranks. Besides DCP's files it has `state.json`, which
says what run it is of, and `checksums.json`, the CRC-32 of every other file, since neither DCP nor
`torch.load` notices a flipped bit. It is written under a temporary name, flushed to disk and then
renamed, so a folder with the final name was once complete; all ranks must see the same folder.

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
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from float8_lab.errors import CheckpointError, for_all, is_for_all
from float8_lab.ranks import ALONE, Ranks, explain_lost_rank

_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ".unfinished-"
_STATE = "state.json"
_CHECKSUMS = "checksums.json"
_CHUNK_BYTES = 1 << 23
_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
_NO_MORE_SAVED = {"rng.cpu", "rng.cuda"}  # states of generators, which training does not use


def save_checkpoint(
    folder: Path,
    step: int,
    values: dict[str, Any],
    state: dict[str, Any],
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
        state: JSON-ready values, to be read without a model.
        keep: How many checkpoints stay, the new one included.
        ranks: Who writes it.

    Raises:
        CheckpointError: If it could not be written on some rank (disk full, no permission); older
            ones stay. Who cannot say what it has to write raises it alone.
        RankFailedError: If a rank ended meanwhile; older ones stay, and an unfinished one.
    """
    target = folder / f"step_{step:08d}"
    temporary = folder / f"{_UNFINISHED}{target.name}"
    try:
        with _explained(f"could not write the checkpoint {target}"):
            ranks.once(lambda: _make_room(temporary, {"step": step, **state}))
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


def _make_room(temporary: Path, state: dict[str, Any]) -> None:
    for leftover in temporary.parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)
    temporary.mkdir(parents=True)
    _write_json(temporary / _STATE, state)


def _put_in_place(temporary: Path, target: Path, checksums: dict[str, int]) -> None:
    _write_json(temporary / _CHECKSUMS, checksums)
    _flush(temporary)
    if target.exists():  # Reached again after resuming from an older step.
        shutil.rmtree(target)
    temporary.rename(target)
    _flush(target.parent)


def load_checkpoint(path: Path, values: dict[str, Any], ranks: Ranks = ALONE) -> None:
    """Put what a checkpoint holds into `values`, in place. Collective over `ranks`.

    It passed `check_checkpoint`, and was written by any number of ranks: names and shapes must be
    the same as then (a `CheckpointError`), shards may differ.
    """
    with _explained(f"could not go on from the checkpoint {path}"):
        planner = DefaultLoadPlanner()
        load(values, checkpoint_id=path, planner=planner, no_dist=ranks.size == 1)
        assert planner.metadata is not None
        # DCP itself minds only what the checkpoint lacks.
        saved = planner.metadata.state_dict_metadata.keys() - _NO_MORE_SAVED
        if unknown := saved - planner.state_dict.keys():
            raise for_all(ValueError(f"it has {min(unknown)}, which this run has not"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints below `folder`, oldest step first; unfinished ones are not among them."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if is_checkpoint(path)), key=_step)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is named like a checkpoint's folder; it may still be damaged."""
    return path.is_dir() and _NAME.fullmatch(path.name) is not None


def check_checkpoint(path: Path, ranks: Ranks = ALONE) -> None:
    """Compare every file of a checkpoint with its checksum; each of `ranks` reads a part of them.

    A `CheckpointError` names the checkpoint, what is wrong, and which older one is intact.
    """
    if damage := next(filter(None, ranks.gather(_find_damage(path, ranks))), None):
        ranks.once(lambda: _refuse(path, damage))


def read_state(path: Path) -> dict[str, Any]:
    """The JSON values of a checkpoint, `step` among them."""
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text())
    except (OSError, ValueError) as error:
        _refuse(path, f"{_STATE} is not readable: {error}")
    return state


def _refuse(path: Path, damage: str) -> NoReturn:
    older = (other for other in list_checkpoints(path.parent)[::-1] if _step(other) < _step(path))
    intact = next((other for other in older if not _find_damage(other)), None)
    advice = "there is no intact older one: start the run again"
    if intact:
        advice = f"the newest intact older one is {intact}: resume from that"
    raise CheckpointError(f"the checkpoint {path} is damaged ({damage}); {advice}")


def _find_damage(path: Path, ranks: Ranks = ALONE) -> str | None:
    """What is wrong with the files that are this rank's to check."""
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


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1))
    _flush(path)


def _flush(path: Path) -> None:
    """Make the contents of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
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
            cause = for_all(error.failures[first][0])
            what += f": rank {first}" if first else ""
        if isinstance(cause, torch.OutOfMemoryError):  # whoever trains knows what to do about it
            raise cause from (None if cause is error else error)
        message = f"{what}: {str(cause) or type(cause).__name__}"
        if any(words in message for words in _FULL):
            message += (
                "; free some space on the disk, then go on with --resume: the checkpoints before "
                "this one are intact"
            )
        raise for_all(CheckpointError(message), is_for_all(cause)) from error
