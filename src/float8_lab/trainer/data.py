"""Byte-level text: read files, split them by file, and address batches by number.

A token is a byte. Files are joined with a NUL byte, which no text contains. Nothing is
downloaded: the default corpus is the source code of the Python standard library.
"""

import functools
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8_lab.errors import ConfigError

SEPARATOR = b"\0"
VALIDATION_FRACTION = 0.1
_SPLITS = ("train", "validation")
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_PRIME = 0x9E3779B97F4A7C15  # between the seeds of epochs


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, held in memory."""

    name: str  # what was read, for reports; no path of the machine for the default corpus
    train: Tensor  # [bytes] uint8
    validation: Tensor  # [bytes] uint8; no file is in both
    train_files: int
    fingerprint: str  # hash of all text in order; equal only for equal data

    def describe(self) -> dict[str, Any]:
        """Describe it, JSON-ready: the splits by their sizes in bytes."""
        sizes = {f"{split}_bytes": len(getattr(self, split)) for split in _SPLITS}
        return {k: v for k, v in vars(self).items() if k not in _SPLITS} | sizes


def load_corpus(path: str | Path | None = None) -> Corpus:
    """Read a file, a folder, or by default the Python standard library's sources.

    A folder is read in sorted order without hidden files and folders. Each file goes to train or
    validation by a hash of its path inside the folder: the split stays whatever is added. A single
    file is cut: its last tenth is for validation. A `ConfigError` if nothing is readable text.
    """
    root, name, suffix = Path(path or ""), str(path), ""
    if path is None:
        root, name, suffix = Path(sysconfig.get_paths()["stdlib"]), "Python standard library", ".py"
    if not root.is_file() and not root.is_dir():
        raise ConfigError(f"no data at {path}: give an existing file or folder of text")
    files = [root] if root.is_file() else _walk(root, suffix)
    read = {file.relative_to(root).as_posix(): _read_text(file) for file in files}
    texts = {place: text for place, text in read.items() if text}
    if not texts:
        raise ConfigError(f"no readable UTF-8 text in {root}: {len(read)} file(s) skipped")
    if len(texts) == 1:
        ((place, text),) = texts.items()
        name, cut = (root / place).name, int(len(text) * (1 - VALIDATION_FRACTION))
        splits = [[text[:cut]], [text[cut:]]]
    else:
        # With few files a side may be empty; then the file nearest to that side moves over.
        order = sorted(texts, key=_hash_place)
        count = sum(_hash_place(place) < VALIDATION_FRACTION for place in texts)
        held_out = order[: min(max(count, 1), len(order) - 1)]
        splits = [[texts[p] for p in texts if (p in held_out) is held] for held in (False, True)]
    joined = [SEPARATOR.join(members) for members in splits]
    if not all(joined):
        raise ConfigError(f"{name}: no text left to train or to validate on; give more text")
    fingerprint = hashlib.sha256(b"".join(len(t).to_bytes(8, "big") + t for t in joined))
    train, validation = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in joined)
    return Corpus(name, train, validation, len(splits[0]), fingerprint.hexdigest()[:16])


def _walk(root: Path, suffix: str) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        seen = {sub for sub in subfolders if not sub.startswith(".")} - _SKIPPED_FOLDERS
        subfolders[:] = sorted(seen)
        for file in sorted(files):
            if file.endswith(suffix) and not file.startswith("."):
                yield Path(folder, file)


def _read_text(path: Path) -> bytes:
    """The file's bytes, none if they are not UTF-8 text or cannot be read."""
    try:
        # A pipe or a socket would block; a dangling link has nothing to read.
        text = path.read_bytes() if path.is_file() else b""
        text.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if SEPARATOR in text else text


def _hash_place(relative: str) -> float:
    """A number in [0, 1) that depends on the path alone."""
    digest = hashlib.sha256(relative.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def check_length(corpus: Corpus, seq_len: int, batch_size: int = 1) -> None:
    """Raise a `ConfigError` unless both splits hold a sequence, and that to train on a batch."""
    needs = [(split, "sequence", seq_len + 1, "--seq-len") for split in _SPLITS]
    needs.append(("train", "batch", batch_size * seq_len, "--batch-size"))
    for split, what, need, option in needs:
        if (size := len(getattr(corpus, split))) < need:
            has = f"the {split} split of {corpus.name} has {size} bytes"
            raise ConfigError(f"{has}, but a {what} needs {need}: lower {option} or give more text")


def train_batch(text: Tensor, *, seed: int, first: int, batch_size: int, seq_len: int) -> Tensor:
    """Cut sequences number `first` to `first + batch_size - 1` of an endless, seeded order.

    No byte is read twice before all of the text is read; then comes another order of the same
    sequences. Sequence i depends on (seed, i) alone, not on batches nor on what was read before:
    that makes resuming exact. Returns each with its next token, [batch_size, seq_len + 1] uint8.
    """
    batch = torch.empty(batch_size, seq_len + 1, dtype=torch.uint8)  # fails at once if too large
    sequences = (len(text) - 1) // seq_len
    for row in range(batch_size):
        epoch, place = divmod(first + row, sequences)
        start = seq_len * int(_order(sequences, seed, epoch)[place])
        batch[row] = text[start : start + seq_len + 1]
    return batch


@functools.lru_cache(4)
def _order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the numbers below `count` in an order that depends on seed and epoch."""
    generator = torch.Generator().manual_seed((seed + epoch * _PRIME) % 2**63)
    return torch.randperm(count, generator=generator)


def validation_batches(
    text: Tensor, *, batches: int, batch_size: int, seq_len: int
) -> Iterator[Tensor]:
    """Cut sequences spread evenly over the text, always the same, overlapping if it is short.

    Yields [batch_size, seq_len + 1] uint8.
    """
    last, count = len(text) - seq_len - 1, batches * batch_size
    starts = [last * i // max(count - 1, 1) for i in range(count)]
    rows = torch.stack([text[start : start + seq_len + 1] for start in starts])
    yield from torch.split(rows, batch_size)
