"""Takes the place of `datasets`, which brings pandas and Arrow, for what torchtitan asks of it."""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = "datasets", "datasets.distributed"


class Dataset(list[dict[str, Any]]):
    def skip(self, number: int) -> "Dataset":
        return Dataset(self[number:])


def load_dataset(path: str, split: str) -> Dataset:
    """Read a folder of files of JSON lines."""
    files = sorted(Path(path).glob("*.json"))
    return Dataset(json.loads(line) for file in files for line in file.read_text().splitlines())


def split_dataset_by_node(dataset: Dataset, rank: int, world_size: int) -> Dataset:
    return Dataset(dataset[rank::world_size])


def take_its_place() -> bool:
    """From now on, unless it is installed; returns whether it is not."""
    missing = importlib.util.find_spec(NAMES[0]) is None
    if missing:
        sys.modules.update(dict.fromkeys(NAMES, sys.modules[__name__]))
    return missing


@contextlib.contextmanager
def in_its_place() -> Iterator[None]:
    """While torchtitan is imported: others, who look for it in this process, do not find this."""
    names = NAMES if take_its_place() else ()
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
