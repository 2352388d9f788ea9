"""The files of a checkpoint: those that are read, and new ones that take their place."""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from float8.checkpoints.schemes import EXPONENTS, scheme_of
from float8.formats import E4M3, E5M2, FLOAT8_MAX
from float8.kernels.runtime.private import warn

INDEX, CONFIG = "model.safetensors.index.json", "config.json"


def import_safetensors() -> Any:
    """Return the package safetensors, which only checkpoints need."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors: got no such package; pip install safetensors") from error
    return safetensors


class Checkpoint:
    """The safetensors files of a folder, each opened once; raises as `read_float8_checkpoint`."""

    def __init__(self, folder: Path, device: Any = "cpu") -> None:
        self.scheme = scheme_of(_read_json(folder / CONFIG).get("quantization_config"))
        listed = _read_index(folder / INDEX) if (folder / INDEX).exists() else {}
        self._file_of: dict[str, Any] = {}
        for path in sorted(listed or folder.glob("*.safetensors")):
            file = _opened(path, device)
            there = {*file.keys()}
            if missing := listed.get(path, there) - there:
                raise ValueError(f"{path}: got no {min(missing)!r}, which the index says is in it")
            there = listed.get(path, there)
            if twice := there & self._file_of.keys():
                raise ValueError(
                    f"{folder}: got {min(twice)!r} in two files and no index, expected it in one; "
                    f"remove the files that are not of this checkpoint"
                )
            self._file_of |= dict.fromkeys(there, file)
        if not self._file_of:
            raise FileNotFoundError(f"{folder}: got no tensors, expected safetensors files")
        self.in_float8, suffix = set[str](), self.scheme.scale_suffix
        for name in self._file_of:
            weight: Any = self.described(name)
            scale = self.described(name + suffix)
            if scale is not None or weight[0] in FLOAT8_MAX:
                self.scheme.require_pair(name, weight, scale)
                self.in_float8.add(name)
        others = self._file_of.keys() - {name + suffix for name in self.in_float8}
        self.names = sorted(name for name in others if not name.endswith(_OF_ACTIVATIONS))

    def described(self, name: str) -> tuple[Any, tuple[int, ...]] | None:
        """Return dtype and shape of a tensor, of the header alone; None: it is not there."""
        if name not in self._file_of:
            return None
        header = self._file_of[name].get_slice(name)
        dtype = header.get_dtype()
        return _DTYPES.get(dtype, dtype), tuple(header.get_shape())

    def read(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return a tensor; a weight in float8 as a `Float8Tensor` that stands for `dtype`."""
        data: Tensor = self._file_of[name].get_tensor(name)
        if name not in self.in_float8:
            return data
        scale_name = name + self.scheme.scale_suffix
        scale = self._file_of[scale_name].get_tensor(scale_name)
        return self.scheme.weight(data, scale, dtype)


# Ends of names of scales of activations and caches, which are of no use here.
_OF_ACTIVATIONS = (".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")

# Names that safetensors gives to dtypes of numbers with a point, and of scales; others stay names.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}
_DTYPES |= {"F16": torch.float16, "F8_E4M3": E4M3, "F8_E5M2": E5M2}
_DTYPES |= {"F8_E8M0": EXPONENTS, "U8": torch.uint8}


def _opened(path: Path, device: Any) -> Any:
    safetensors = import_safetensors()
    try:
        return safetensors.safe_open(path, "pt", str(device))
    except safetensors.SafetensorError as error:
        got = f"a file that is cut or damaged ({error})"
        raise ValueError(f"{path}: got {got}, expected a whole one; fetch it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, in which no name is twice: the last would win."""

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"a name twice among {[*found][:4]}")
        return found

    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=each_once)
        if isinstance(found, dict):
            return found
        raise ValueError(f"a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: got {error}, expected an object of JSON; fetch it again"
        ) from error


def _read_index(index: Path) -> dict[Path, set[str]]:
    """Return the names of the tensors in each file, all of them in the folder of the index."""
    found = _read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index}: got no weight_map of names and files; fetch it again")
    names: dict[Path, set[str]] = {}
    for name, file in found.items():
        path = PurePath(file if isinstance(file, str) else "")
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"{index}: got {file!r} as the file of {name!r}, expected one in this folder; "
                f"fetch the checkpoint again, from somebody you trust"
            )
        names.setdefault(index.parent / path, set()).add(name)
    return names


_UNFINISHED = ".float8_unfinished"  # a folder of files that are not in their place yet

# Names that files with weights of an older model have, by this library or transformers.
_SHARDS = re.compile(r"model(-\d{5}(-of-\d{5})?)?\.safetensors")


class NewFiles:
    """Files that are written beside those in a folder, and then put in their place.

    Shards get names that are free, so an older checkpoint is whole until the index is replaced. As
    a context it removes what is unfinished at the end, and what a crash has left.
    """

    def __init__(self, folder: Path, max_shard_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._new, self._max = folder, folder / _UNFINISHED, max_shard_size
        self._size = self._total = 0
        there = {path.name: path for path in folder.iterdir()}
        shards = (path for name, path in there.items() if _SHARDS.fullmatch(name))
        self._older = [path for path in shards if not path.is_dir()]
        names = (f"model-{number:05d}.safetensors" for number in range(1, 100_000))
        self._free = (name for name in names if name not in there)
        self._file_of: dict[str, str] = {}
        self._shard: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def __enter__(self) -> "NewFiles":
        self.__exit__()
        self._new.mkdir()
        return self

    def __exit__(self, *_: Any) -> None:
        shutil.rmtree(self._new, ignore_errors=True)

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Add tensors by their names, to one file."""
        size = sum(x.nbytes for x in tensors.values())
        if self._shard and self._size + size > self._max:
            self._write()
        self._size, self._total = self._size + size, self._total + size
        for name, x in tensors.items():
            x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
            if (storage := x.untyped_storage().data_ptr()) in self._storages:
                x = x.clone()  # safetensors refuses two views of one memory
            self._shard[name] = x
            self._storages.add(storage)

    def _write(self) -> None:
        """Write a file of the tensors that were added last."""
        name = next(self._free)
        import_safetensors().torch.save_file(self._shard, self._new / name, {"format": "pt"})
        _to_disk(self._new / name)
        self._file_of |= dict.fromkeys(self._shard, name)
        self._shard, self._storages, self._size = {}, set(), 0

    def replace(self, config: str) -> None:
        """Put the files in the place of those of an older model; if that fails, these stay."""
        self._write()
        index = {"metadata": {"total_size": self._total}, "weight_map": self._file_of}
        for name, text in ((INDEX, json.dumps(index, indent=2)), (CONFIG, config)):
            (self._new / name).write_text(text, encoding="utf-8")
            _to_disk(self._new / name)
        with contextlib.ExitStack() as undo:
            for name in (*sorted({*self._file_of.values()}), INDEX, CONFIG):
                path, kept = self._folder / name, self._new / f"older {name}"
                if path.exists():
                    shutil.copy2(path, kept)
                    undo.callback(kept.replace, path)
                else:
                    undo.callback(path.unlink, missing_ok=True)
                (self._new / name).replace(path)
            undo.pop_all()
        for path in self._older:
            try:
                path.unlink()
            except OSError as error:  # no reason to fail: the new model stands
                warn(
                    f"float8: the new checkpoint is written, but {path} of the older one could not "
                    f"be removed ({error}); remove it: some readers prefer it to the index"
                )


def _to_disk(path: Path) -> None:
    """Flush a file to the disk; some file systems report a full disk only then."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
