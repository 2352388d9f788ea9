"""Read the files of a checkpoint folder, and replace the folder by a new checkpoint."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from float8.checkpoints.schemes import COMPRESSED, EXPONENTS, SCHEMES, scheme_of
from float8.formats import E4M3, E5M2, FLOAT8_MAX
from float8.kernels.runtime.private import warn

INDEX, CONFIG = "model.safetensors.index.json", "config.json"

# Weight files as this library and transformers name them.
_SHARD = re.compile(r"model(-\d{5,}(-of-\d{5})?)?\.safetensors")

# Suffixes of static scales of activations and KV caches, which are ignored.
_ACTIVATION_SCALE = re.compile(r"\.(input|output|activation|act|k|v|kv)_scale\Z")

# Dtypes of weights and scales by their names in safetensors; other dtypes stay strings.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}
_DTYPES |= {"F16": torch.float16, "F8_E4M3": E4M3, "F8_E5M2": E5M2}
_DTYPES |= {"F8_E8M0": EXPONENTS, "U8": torch.uint8}


def import_safetensors() -> Any:
    """Import and return the package safetensors, which only checkpoints need."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors: got no such package; pip install safetensors") from error
    return safetensors


class Checkpoint:
    """The open safetensors files of a folder. Raises the errors of `read_float8_checkpoint`."""

    def __init__(self, folder: Path, device: Any = "cpu") -> None:
        opened, error = None, None
        # Open all files again if a save has replaced the folder meanwhile.
        while opened != (current := _current_version(folder)):
            opened, error = current, None
            try:
                self._open(current[0], device)
            except (OSError, ValueError, RuntimeError) as caught:
                error = caught
        if error:
            raise error

    def _open(self, folder: Path, device: Any) -> None:
        indexed: dict[str, set[str]] = {}
        with contextlib.suppress(FileNotFoundError):
            indexed = _read_index(folder / INDEX)
        self.scheme = scheme_of(_read_json(folder / CONFIG).get("quantization_config"))
        self._file_of: dict[str, Any] = {}
        self.files = sorted(indexed or (path.name for path in folder.glob("*.safetensors")))
        for path in self.files:
            file = _open_safetensors(folder / path, device)
            names = indexed.get(path) or {*file.keys()}
            if missing := names - {*file.keys()}:
                got = f"got no {min(missing)!r}, which the index says is in it"
                raise ValueError(f"{folder / path}: {got}")
            if twice := names & self._file_of.keys():
                raise ValueError(
                    f"{folder}: got {min(twice)!r} in two files and no index, expected it in one; "
                    f"remove the files that are not of this checkpoint"
                )
            self._file_of |= dict.fromkeys(names, file)
        if not self._file_of:
            raise FileNotFoundError(f"{folder}: got no tensors, expected safetensors files")
        if self.scheme.block is None and any(x.endswith(".weight_scale") for x in self._file_of):
            self.scheme = SCHEMES[COMPRESSED, self.scheme.strategy]  # as AutoFP8 names its scales
        self.in_float8, suffix = set[str](), self.scheme.scale_suffix
        for name in self._file_of:
            weight: Any = self.dtype_and_shape(name)
            scale = self.dtype_and_shape(name + suffix)
            if scale is not None or weight[0] in FLOAT8_MAX:
                self.scheme.require_pair(name, weight, scale)
                self.in_float8.add(name)
        unscaled = self._file_of.keys() - {name + suffix for name in self.in_float8}
        self.names = sorted(name for name in unscaled if not _ACTIVATION_SCALE.search(name))

    def dtype_and_shape(self, name: str) -> tuple[Any, tuple[int, ...]] | None:
        """Return dtype and shape of the tensor `name` from the file's header; None if missing."""
        if name not in self._file_of:
            return None
        header = self._file_of[name].get_slice(name)
        dtype = header.get_dtype()
        return _DTYPES.get(dtype, dtype), tuple(header.get_shape())

    def read(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Read the tensor `name`; a float8 weight becomes a `Float8Tensor` that reports `dtype`."""
        data: Tensor = self._file_of[name].get_tensor(name)
        if name not in self.in_float8:
            return data
        scale_name = name + self.scheme.scale_suffix
        scale = self._file_of[scale_name].get_tensor(scale_name)
        return self.scheme.weight(data, scale, dtype)


def _open_safetensors(path: Path, device: Any) -> Any:
    """Open a safetensors file for reading its tensors to `device`."""
    safetensors = import_safetensors()
    try:
        return safetensors.safe_open(path, "pt", str(device))
    except safetensors.SafetensorError as error:
        got = f"a file that is cut or damaged ({error})"
        raise ValueError(f"{path}: got {got}, expected a whole one; fetch it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `ValueError` if a key occurs twice (the last would win)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"a name twice among {[*found][:4]}")
        return found

    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=unique)
        if isinstance(found, dict):
            return found
        raise ValueError(f"a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: got {error}, expected a JSON object; fetch it again") from error


def _read_index(index: Path) -> dict[str, set[str]]:
    """Return the tensor names in each file of an index; files outside its folder are refused."""
    file_of = _read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise ValueError(f"{index}: got no weight_map of names and files; fetch it again")
    names: dict[str, set[str]] = {}
    for name, file in file_of.items():
        path = PurePath(file if isinstance(file, str) else "")
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"{index}: got {file!r} as the file of {name!r}, expected one in this folder; "
                f"fetch the checkpoint again, from somebody you trust"
            )
        names.setdefault(str(path), set()).add(name)
    return names


def _current_version(folder: Path) -> tuple[Path, int, int]:
    """Return the folder to read, and inode and modification time of its index (0 without one)."""
    older = _sibling(folder, "older")  # has the checkpoint between the renames of a save
    current = older if older.exists() and not folder.exists() else folder
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        stat = (current / INDEX).stat()
        return current, stat.st_ino, stat.st_mtime_ns
    return current, 0, 0


def write_files(
    folder: Path, tensors: Iterable[dict[str, Tensor]], config: str, max_shard_size: int
) -> None:
    """Write a checkpoint into a new folder beside `folder`, then swap the two by renames.

    Files in `folder` that are not part of a checkpoint move to the new folder. After an error
    `folder` is as before. A file has at most `max_shard_size` bytes, or one dict of `tensors`.
    """
    folder = folder.resolve()  # replace what a symbolic link leads to, not the link
    if folder.is_file() or folder.is_mount() or folder == Path.cwd():
        got = "got a file, a mount point or the working directory, expected a folder to rename"
        raise OSError(errno.EINVAL, f"{got}; save to a new folder", str(folder))
    unfinished, older = _sibling(folder, "unfinished"), _sibling(folder, "older")
    with _locked(folder):
        _finish_swap(folder, older)  # of a save that was killed
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            _write_into(unfinished, tensors, config, max_shard_size)
            if folder.exists():
                shutil.copystat(folder, unfinished)
                folder.rename(older)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                _finish_swap(folder, older)
            except OSError as error:  # no reason to fail: the new checkpoint is in place
                warn(
                    f"float8: files that {folder} had before the save are still in {older} "
                    f"({error}); move what you need, and remove that folder"
                )


def _sibling(folder: Path, suffix: str) -> Path:
    """Return the path of the hidden sibling of `folder` that a save uses, named by `suffix`."""
    folder = folder.resolve()
    return folder.parent / f".{folder.name}.float8_{suffix}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock `folder` against other saves; the operating system frees a killed process's lock."""
    lock = _sibling(folder, "lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_busy = not os.path.samestat(lock.stat(), os.fstat(file.fileno()))
        except OSError as error:  # locked, or just removed; else the file system has no locks
            is_busy = isinstance(error, BlockingIOError | FileNotFoundError)
        if is_busy:
            got = "another process or thread saves to this folder; wait for it, or save to another"
            raise OSError(errno.EBUSY, got, str(folder))
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _finish_swap(folder: Path, older: Path) -> None:
    """Remove the replaced folder `older`; rename it back if no new checkpoint took its place."""
    if not older.exists():
        return
    if not (folder / INDEX).exists():
        older.rename(folder)
        return
    for path in older.iterdir():
        if _SHARD.fullmatch(path.name) or (folder / path.name).is_file():
            path.unlink()
        else:
            path.rename(folder / path.name)
    older.rmdir()


def _write_into(
    folder: Path, tensors: Iterable[dict[str, Tensor]], config: str, max_shard_size: int
) -> None:
    """Write shards, index and `config.json` into an empty folder."""
    total_size, file_of, save_file = 0, dict[str, str](), import_safetensors().torch.save_file
    for number, shard in enumerate(_shards(tensors, max_shard_size), 1):
        name = f"model-{number:05d}.safetensors"
        _to_disk(folder / name, partial(save_file, shard, metadata={"format": "pt"}))
        file_of |= dict.fromkeys(shard, name)
        total_size += sum(x.nbytes for x in shard.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
    for name, text in ((INDEX, json.dumps(index, indent=2)), (CONFIG, config)):
        _to_disk(folder / name, partial(Path.write_text, data=text, encoding="utf-8"))


def _shards(tensors: Iterable[dict[str, Tensor]], max_size: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file on the CPU, in one dict that is cleared between files."""
    shard, storages, size = dict[str, Tensor](), set[int](), 0
    for group in tensors:
        group_size = sum(x.nbytes for x in group.values())
        if shard and size + group_size > max_size:
            yield shard
            shard.clear()
            storages, size = set(), 0
        size += group_size
        for name, x in group.items():
            x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
            if (storage := x.untyped_storage().data_ptr()) in storages:
                x = x.clone()  # safetensors refuses two views of one storage
            shard[name] = x
            storages.add(storage)
    yield shard


def _to_disk(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file and flush it to the disk; failures raise an `OSError` with `path` and errno."""
    try:
        write(path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # some file systems report a full disk only then
    except (OSError, import_safetensors().SafetensorError) as error:
        # safetensors has the number in its message alone.
        code = re.search(r"(?:os error|code:) (\d+)", str(error))
        number = getattr(error, "errno", None) or (int(code[1]) if code else errno.EIO)
        text = f"{error}; free some space, or save to another folder"
        raise OSError(number, text, str(path)) from error
