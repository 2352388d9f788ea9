"""Read the files of a checkpoint, and write new files that replace an older checkpoint."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from float8.checkpoints.schemes import COMPRESSED, EXPONENTS, Header, scheme_named, scheme_of
from float8.formats import E4M3, E5M2, FLOAT8_MAX
from float8.kernels.runtime.private import warn

INDEX, CONFIG = "model.safetensors.index.json", "config.json"


def import_safetensors() -> Any:
    """Import and return `safetensors`; raise an `ImportError` that tells how to install it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors: got no such package; pip install safetensors") from error
    return safetensors


class Checkpoint:
    """Opens a folder of safetensors files, checks their headers, and reads tensors one by one."""

    def __init__(self, folder: Path, device: str | torch.device = "cpu") -> None:
        index: Any = self  # differs from any version, so that the loop runs
        # Open all files again if a save replaced the checkpoint while they were being opened.
        while index != (index := _index_version(folder)):
            error: Exception | None = None
            try:
                self._open(folder, device)
            except (OSError, ValueError, RuntimeError) as caught:
                error = caught
        if error:
            raise error

    def _open(self, folder: Path, device: str | torch.device) -> None:
        """Open all files, to read to `device`; raise if they contradict index or `config.json`."""
        listed: dict[str, set[str]] = {}  # file -> names of its tensors; {} without an index
        with contextlib.suppress(FileNotFoundError):
            listed = _read(folder, INDEX, _read_index)
        self._file_of: dict[str, Any] = {}  # name of a tensor -> the opened file with it
        self.files = sorted(listed or (path.name for path in folder.glob("*.safetensors")))
        for file_name in self.files:
            file = _read(folder, file_name, partial(_open_safetensors, device=device))
            names = listed.get(file_name, {*file.keys()})
            if missing := names - {*file.keys()}:
                got = f"got no {min(missing)!r}, which the index says is in it"
                raise ValueError(f"{folder / file_name}: {got}")
            if repeated := names & self._file_of.keys():
                got = f"got {min(repeated)!r} in two files and no index, expected it in one"
                fix = "remove the files that are not of this checkpoint"
                raise ValueError(f"{folder}: {got}; {fix}")
            self._file_of |= dict.fromkeys(names, file)
        if not self._file_of:
            expected = "safetensors files beside config.json"
            raise FileNotFoundError(f"{folder}: got no tensors, expected {expected}")
        self.scheme = scheme_of(self._quantization_config(folder))
        if self.scheme.block is None and any(x.endswith(".weight_scale") for x in self._file_of):
            self.scheme = scheme_named(COMPRESSED, self.scheme.strategy)  # AutoFP8 uses that suffix
        self.headers: dict[str, Header] = {}
        for name, file in self._file_of.items():
            header = file.get_slice(name)
            dtype = header.get_dtype()
            self.headers[name] = _DTYPES.get(dtype, dtype), tuple(header.get_shape())
        self.in_float8, suffix = set[str](), self.scheme.scale_suffix
        for name, (dtype, shape) in self.headers.items():
            scale = self.headers.get(name + suffix)
            if scale is not None or dtype in FLOAT8_MAX:
                self.scheme.require_pair(name, (dtype, shape), scale)
                self.in_float8.add(name)
        others = self.headers.keys() - {name + suffix for name in self.in_float8}
        self.names = sorted(name for name in others if not name.endswith(_SCALES_OF_ACTIVATIONS))

    def _quantization_config(self, folder: Path) -> Any:
        """Return the `quantization_config` of `config.json` in `folder`, or None if it has none.

        Exception: files of ComfyUI or modelopt without one give {"quant_method": "comfy"} or
        "modelopt", so that errors name their format. Others without `config.json` raise an error.
        """
        with contextlib.suppress(FileNotFoundError):
            if config := _read(folder, CONFIG, _read_json).get("quantization_config"):
                return config
        metadata = next(iter(self._file_of.values())).metadata() or {}
        if any(map(_COMFY_NAMES.search, [*self._file_of, *metadata])):
            return {"quant_method": "comfy"}
        if (folder / "hf_quant_config.json").exists():
            return {"quant_method": "modelopt"}
        return _read(folder, CONFIG, _read_json).get("quantization_config")  # raises without file

    def read(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Read tensor `name`: a float8 weight as `Float8Tensor` of `dtype`, others as stored."""
        data: Tensor = self._file_of[name].get_tensor(name)
        if name not in self.in_float8:
            return data
        scale_name = name + self.scheme.scale_suffix
        return self.scheme.weight(data, self._file_of[scale_name].get_tensor(scale_name), dtype)


_SCALES_OF_ACTIVATIONS: tuple[str, ...] = (".input_scale", ".output_scale", ".activation_scale")
_SCALES_OF_ACTIVATIONS += (".act_scale", ".k_scale", ".v_scale", ".kv_scale")
_COMFY_NAMES = re.compile(r"^(scaled_fp8|_quantization_metadata)$|\.(scale_weight|comfy_quant)$")
# Names in safetensors files of floating-point dtypes and dtypes of scales; others stay strings.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}
_DTYPES |= {"F16": torch.float16, "F8_E4M3": E4M3, "F8_E5M2": E5M2}
_DTYPES |= {"F8_E8M0": EXPONENTS, "U8": torch.uint8}


def _open_safetensors(path: Path, device: str | torch.device) -> Any:
    safetensors = import_safetensors()
    try:
        return safetensors.safe_open(path, "pt", str(device))
    except safetensors.SafetensorError as error:
        got = f"a file that is cut or damaged ({error})"
        raise ValueError(f"{path}: got {got}, expected a whole one; fetch it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raise `ValueError` for other content or a repeated key."""

    def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(content := dict(pairs)) < len(pairs):
            raise ValueError(f"a name twice among {[*content][:4]}")
        return content

    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=unique_names)
        if isinstance(content, dict):
            return content
        raise ValueError(f"a {type(content).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: got {error}, expected a JSON object; fetch it again") from error


def _read_index(index: Path) -> dict[str, set[str]]:
    """Return {file: names of tensors} of `index`; raise if {}, or for a file outside its folder."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: got no weight_map of names and files; fetch it again")
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        path = PurePath(file if isinstance(file, str) else "")
        if not path.parts or path.is_absolute() or ".." in path.parts:
            got = f"got {file!r} as the file of {name!r}, expected one in this folder"
            raise ValueError(f"{index}: {got}; fetch the checkpoint again, from somebody you trust")
        names.setdefault(str(path), set()).add(name)
    return names


def _read(folder: Path, name: str, read: Callable[[Path], Any]) -> Any:
    """Return `read(path)` of file `name` among those that a save has not moved, or in `folder`."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, RuntimeError):  # moved just now
        return read(folder / _COMPLETE / name)
    return read(folder / name)


def _index_version(folder: Path) -> tuple[int, int] | None:
    """Return (inode, mtime in ns) of `folder`'s index file, new after a save; None without one."""
    with contextlib.suppress(FileNotFoundError):
        status = _read(folder, INDEX, Path.stat)
        return status.st_ino, status.st_mtime_ns
    return None


_UNFINISHED = ".float8_unfinished"  # prefix of a folder with files that are being written
_COMPLETE = ".float8_complete"  # folder with complete files, until they are moved out
_LOCK = ".float8_lock"
# Names of files of weights that this library or transformers may have written before.
_SHARDS = re.compile(r"model(-\d{5}(-of-\d{5})?)?\.safetensors")


def write_files(
    folder: Path, tensors: Iterable[dict[str, Tensor]], config: str, max_shard_size: int
) -> None:
    """Write a checkpoint to `folder`, replacing an older one, which is kept if an error occurs.

    Each dict {name: tensor} goes into one file as a whole. Tensors of a file have `max_shard_size`
    bytes at most, except a single dict that is larger. `config` is the text of `config.json`. All
    files are completed in a subfolder, then moved to `folder`. If the process is killed during the
    moves, `Checkpoint` reads the remaining files in the subfolder, and the next save moves them.
    """
    names = (f"model-{number:05d}.safetensors" for number in range(1, 100_000))
    # New names, so that the older checkpoint can be read until its index is replaced.
    unused_names = (name for name in names if not os.path.lexists(folder / name))
    total_size, file_of = 0, dict[str, str]()  # name of a tensor -> file
    save_file = import_safetensors().torch.save_file
    with _locked(folder):
        _move_to_places(folder)  # finish an older save that was killed while it moved files
        for abandoned in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        (unfinished := folder / f"{_UNFINISHED}_{uuid.uuid4().hex}").mkdir()
        try:
            for shard in _shards(tensors, max_shard_size):
                name = next(unused_names)
                _to_disk(unfinished / name, partial(save_file, shard, metadata={"format": "pt"}))
                file_of |= dict.fromkeys(shard, name)
                total_size += sum(x.nbytes for x in shard.values())
            index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
            for name, text in ((INDEX, json.dumps(index, indent=2)), (CONFIG, config)):
                _to_disk(unfinished / name, partial(Path.write_text, data=text, encoding="utf-8"))
            unfinished.rename(folder / _COMPLETE)
            try:
                _move_to_places(folder)
            except BaseException:  # all files are back in `_COMPLETE`, and are removed below
                (folder / _COMPLETE).rename(unfinished)
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        shards = (path for path in folder.iterdir() if _SHARDS.fullmatch(path.name))
        for older in (path for path in shards if path.name not in file_of.values()):
            try:
                older.unlink()
            except OSError as error:  # only warn, since the new checkpoint is written
                got = f"{older} of the older one could not be removed ({error}); remove it"
                why = "some readers prefer it to the index"
                warn(f"float8: the new checkpoint is written, but {got}: {why}")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Context manager that makes and, if supported, locks `folder`; raises `OSError` if locked."""
    folder.mkdir(parents=True, exist_ok=True)
    with (lock := folder / _LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another save may have removed the file that was opened, and a third made a new one.
            is_busy = not os.path.samestat(lock.stat(), os.fstat(file.fileno()))
        except OSError as error:  # save without a lock if the file system has none
            is_busy = isinstance(error, BlockingIOError | FileNotFoundError)
        if is_busy:
            got = "another process or thread saves to this folder; wait for it, or save to another"
            raise OSError(errno.EBUSY, got, str(folder))
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _shards(tensors: Iterable[dict[str, Tensor]], max_size: int) -> Iterator[dict[str, Tensor]]:
    """Yield dicts of `tensors`, on the CPU, merged up to `max_size` bytes; larger ones alone."""
    # One dict is yielded and cleared again and again, so that one shard is in memory at a time.
    shard, storages, size = dict[str, Tensor](), set[int](), 0
    for named_tensors in tensors:
        added_size = sum(x.nbytes for x in named_tensors.values())
        if shard and size + added_size > max_size:
            yield shard
            shard.clear()
            storages, size = set(), 0
        size += added_size
        for name, x in named_tensors.items():
            x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
            if (storage := x.untyped_storage().data_ptr()) in storages:
                x = x.clone()  # safetensors refuses tensors that share a storage
            shard[name] = x
            storages.add(storage)
    yield shard


def _move_to_places(folder: Path) -> None:
    """Move complete files of a save, if any, to `folder`; if one fails, move none, and raise."""
    complete = folder / _COMPLETE
    with contextlib.ExitStack() as undo:
        for name in (*sorted(path.name for path in complete.glob("*.safetensors")), INDEX, CONFIG):
            new, path = complete / name, folder / name
            if not new.exists():  # no `_COMPLETE`, or a save that was killed has moved this file
                continue
            if path.exists():
                # Not "*.safetensors": after a kill the next save must not take it for a shard.
                backup = complete / f"{name}.older"
                shutil.copy2(path, backup)
                undo.callback(backup.replace, path)
            new.replace(path)
            undo.callback(path.replace, new)
        undo.pop_all()  # all moves succeeded: undo none
    shutil.rmtree(complete, ignore_errors=True)


def _to_disk(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write(path)`, then fsync; raise `OSError` with `path` if the OS or safetensors fail."""
    try:
        write(path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # some file systems report a full disk only then
    except (OSError, import_safetensors().SafetensorError) as error:
        code = re.search(r"(?:os error|code:) (\d+)", str(error))  # in texts of safetensors
        number = getattr(error, "errno", None) or (int(code[1]) if code else errno.EIO)
        text = f"{error}; free some space, or save to another folder"
        raise OSError(number, text, str(path)) from error
