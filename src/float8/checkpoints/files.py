"""The files of a checkpoint that takes the place of an older one, which goes when all are there."""

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from float8.checkpoints.reading import CONFIG, INDEX

_UNFINISHED = ".float8_checkpoint_unfinished"
_SHARDS = re.compile(r"model(-\d{5}(-of-\d{5})?)?\.safetensors")
"""Names that files with weights of an older model have, by this library or transformers."""


class NewFiles:
    """Files that are written beside those in a folder, and then put in their place."""

    def __init__(self, folder: Path, save: Callable[..., None]) -> None:
        self._folder, self._new, self._save = folder, folder / _UNFINISHED, save
        self._file_of: dict[str, str] = {}
        taken = {path.name for path in folder.iterdir()}
        names = (f"model-{number:05d}.safetensors" for number in range(1, 100_000))
        self._free = (name for name in names if name not in taken)

    @classmethod
    @contextlib.contextmanager
    def beside(cls, folder: Path, save: Callable[..., None]) -> Iterator["NewFiles"]:
        """Give new files for a folder; at the end remove what is unfinished, also of a crash.

        Shards get names that are free, so an older checkpoint is whole until the index is replaced.

        Args:
            folder: the folder of the checkpoint; made if it does not exist.
            save: `safetensors.torch.save_file`.
        """
        new, was_there = folder / _UNFINISHED, folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if new.is_dir() and not new.is_symlink():
                shutil.rmtree(new)
            new.unlink(missing_ok=True)
            new.mkdir()
            yield cls(folder, save)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            if not was_there:
                with contextlib.suppress(OSError):  # the folder has files
                    folder.rmdir()

    def add(self, shard: dict[str, Tensor]) -> None:
        """Write one more file of tensors, by their names."""
        name = next(self._free)
        self._save(shard, self._new / name, metadata={"format": "pt"})
        _to_disk(self._new / name)
        self._file_of |= dict.fromkeys(shard, name)

    def replace(self, total_size: int, config: str) -> None:
        """Put the files in the place of those of an older model; if that fails, these stay.

        Args:
            total_size: bytes of all tensors.
            config: what `config.json` says.
        """
        index = {"metadata": {"total_size": total_size}, "weight_map": self._file_of}
        for name, text in ((INDEX, json.dumps(index, indent=2)), (CONFIG, config)):
            (self._new / name).write_text(text, encoding="utf-8")
            _to_disk(self._new / name)
        older = [
            path
            for path in self._folder.iterdir()
            if _SHARDS.fullmatch(path.name) and not path.is_dir()
        ]
        shards, index_path = sorted({*self._file_of.values()}), self._folder / INDEX
        kept = self._new / "older"
        if index_path.exists():
            shutil.copy2(index_path, kept)
        replaced = False
        try:
            for name in shards:
                (self._new / name).replace(self._folder / name)
            (self._new / INDEX).replace(index_path)
            replaced = True
            (self._new / CONFIG).replace(self._folder / CONFIG)
        except BaseException:
            if replaced and kept.exists():
                kept.replace(index_path)
            elif replaced:
                index_path.unlink()
            for name in shards:
                (self._folder / name).unlink(missing_ok=True)
            raise
        left = []
        for path in older:
            try:
                path.unlink()
            except OSError as error:  # no reason to fail: the new model stands
                left.append(f"{path} ({error})")
        if left:
            warnings.warn(
                f"float8: the new checkpoint is written, but {len(left)} file(s) of the older one "
                f"could not be removed: {', '.join(left)}; remove them, since some readers prefer "
                f"a model.safetensors to an index",
                stacklevel=3,
            )


def _to_disk(path: Path) -> None:
    """Flush a file to the disk; some file systems report a full disk only then."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
