"""Saves that are killed, that meet another save or a reader, or for which a disk is too small."""

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from float8 import all_linears, convert_to_float8_training
from float8.checkpoints import read_float8_checkpoint, save_float8_checkpoint
from float8.tensor import Float8Tensor
from support.float8_files import INDEX, bits

pytest.importorskip("safetensors")

BLOCKS = ("blockwise", "fine-grained-fp8", 9_000)
CHANNELS = ("rowwise", "compressed-tensors", 5_000)
"""Recipe, format and bytes of a shard: two shards, and three."""


@cache
def trained(seed: int, recipe: str) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    return convert_to_float8_training(model, config=recipe, module_filter_fn=all_linears)


def save(seed: int, how: Any, folder: Path) -> None:
    save_float8_checkpoint(trained(seed, how[0]), folder, how[1], max_shard_size=how[2])


def values(folder: Path) -> dict[str, Any]:
    """All bytes of a checkpoint, comparable; {}: there is none."""
    try:
        tensors = [*read_float8_checkpoint(folder)]
    except FileNotFoundError:
        return {}
    parts = {n: (x._data, x._scale) if isinstance(x, Float8Tensor) else (x,) for n, x in tensors}
    return {name: [bits(x).numpy().tobytes() for x in part] for name, part in parts.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Any], dict[str, Any]]:
    """The values of a checkpoint that nothing disturbed."""

    @cache
    def saved(seed: int, how: Any) -> dict[str, Any]:
        save(seed, how, folder := tmp_path_factory.mktemp("alone"))
        return values(folder)

    return saved


class Killed(BaseException):
    pass


@contextlib.contextmanager
def before_each_step(call: Callable[[int], object]) -> Iterator[None]:
    """Call something with a number before each change that a save makes to files."""
    steps = [(os, name) for name in ("fsync", "mkdir", "rename", "replace", "unlink", "rmdir")]
    count = 0

    def wrapped(real: Any) -> Any:
        def step(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            call(count)
            return real(*args, **more)

        return step

    with contextlib.ExitStack() as patched:
        for owner, name in (*steps, (fcntl, "flock"), (shutil, "copy2")):
            real = getattr(owner, name)
            patched.enter_context(mock.patch.object(owner, name, wrapped(real)))
        yield


def older(what: str, folder: Path) -> None:
    """Put an older checkpoint of that kind into a folder."""
    if what == "new folder":
        return
    save(1, (*BLOCKS[:2], 10**9 if what == "no index" else BLOCKS[2]), folder)
    (folder / "tokenizer.json").write_text("{}")
    if what == "no index":
        (folder / INDEX).unlink()
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")


KINDS = ["new folder", "index"]
kinds = pytest.mark.parametrize("what", [*KINDS, "no index"])
many = pytest.mark.parametrize(
    "what", [*KINDS, pytest.param("no index", marks=pytest.mark.exhaustive)]
)


@many
def test_a_killed_save_leaves_a_whole_checkpoint(what: str, alone: Any, tmp_path: Path) -> None:
    """The old or the new one, wherever it is killed; also after a next save fails, or is killed."""
    new, was = alone(2, CHANNELS), alone(1, BLOCKS) if "index" in what else {}
    found = []
    for number in range(1, 1000):
        older(what, folder := tmp_path / str(number))
        dead = False

        def kill(count: int, number: int = number) -> None:
            nonlocal dead
            dead = dead or count == number
            if dead:  # it does nothing any more
                raise Killed

        def fill(count: int) -> None:
            raise OSError(errno.ENOSPC, "No space left")

        try:
            with before_each_step(kill):
                save(2, CHANNELS, folder)
        except Killed:
            found.append(values(folder))
        if not dead:
            break
        with mock.patch.object(os, "fsync", fill), pytest.raises(OSError, match="No space"):
            save(3, BLOCKS, folder)
        assert values(folder) == found[-1]
        save(3, BLOCKS, folder)
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        others = {"tokenizer.json"} if "index" in what else set()
        names = {*index.values(), INDEX, "config.json", *others}
        assert {path.name for path in folder.iterdir()} == names
        assert values(folder) == alone(3, BLOCKS)
    assert values(folder) == new
    first_new = found.index(new)
    assert found == [was] * first_new + [new] * (len(found) - first_new)
    assert 5 < first_new < len(found) - 5


def test_a_killed_save_over_a_file_of_another_program(alone: Any, tmp_path: Path) -> None:
    """It comes with the name of a new shard during the save; no backup of it is left as a shard."""
    found = []
    for number in range(1, 1000):
        older("index", folder := tmp_path / str(number))
        since = 0  # steps since the file came

        def step(count: int, number: int = number, folder: Path = folder) -> None:
            nonlocal since
            if not since and [*folder.glob(".float8_unfinished*/config.json")]:
                (folder / "model-00003.safetensors").write_bytes(b"of another program")
                since = count
            if since and count >= since + number:  # it does nothing any more
                raise Killed

        try:
            with before_each_step(step):
                save(2, CHANNELS, folder)
            break
        except Killed:
            found.append(values(folder))
        save(3, BLOCKS, folder)
        assert values(folder) == alone(3, BLOCKS)
        files = json.loads((folder / INDEX).read_text())["weight_map"].values()
        others = INDEX, "config.json", "tokenizer.json"
        assert {x.name for x in folder.iterdir()} == {*files, *others}
    assert values(folder) == found[-1] == alone(2, CHANNELS)


@kinds
def test_readers_see_the_old_or_the_new_checkpoint(what: str, alone: Any, tmp_path: Path) -> None:
    seen = []
    older(what, folder := tmp_path / "folder")
    with before_each_step(lambda count: seen.append(values(folder))):
        save(2, CHANNELS, folder)
    new, was = alone(2, CHANNELS), alone(1, BLOCKS) if "index" in what else {}
    first_new = seen.index(new)
    assert seen == [was] * first_new + [new] * (len(seen) - first_new)


def test_a_reader_between_two_files_of_a_save(alone: Any, tmp_path: Path) -> None:
    """It opens all again if the checkpoint is another one meanwhile, with files of other names."""
    from float8.checkpoints import files

    for wanted in ("_read_index", "_read_json", "_open_safetensors"):
        save(1, BLOCKS, folder := tmp_path / wanted)
        real, calls = getattr(files, wanted), []

        def first(*args: Any, real: Any = real, calls: Any = calls, **more: Any) -> Any:
            found = real(*args, **more)
            calls.append(args)
            if len(calls) == 1:
                save(2, CHANNELS, folder)
            return found

        with mock.patch.object(files, wanted, first):
            assert values(folder) == alone(2, CHANNELS)
        assert len(calls) > 1


@many
def test_of_two_saves_one_is_refused_or_the_last_is_whole(
    what: str, alone: Any, tmp_path: Path
) -> None:
    """Another begins before each step of the first."""
    ends = []
    for number in range(1, 1000):
        older(what, folder := tmp_path / str(number))
        errors: dict[int, Any] = {}

        def attempt(seed: int, how: Any, folder: Path = folder, errors: Any = errors) -> None:
            errors[seed] = None
            try:
                save(seed, how, folder)
            except OSError as error:
                errors[seed] = error.errno, str(folder) in str(error)

        def begin(count: int, number: int = number, attempt: Any = attempt) -> None:
            if count == number and len(errors) == 1:  # noqa: B023
                attempt(3, BLOCKS)

        with before_each_step(begin):
            attempt(2, CHANNELS)
        assert [*errors.values()].count(None) > 0
        assert {*errors.values()} <= {None, (errno.EBUSY, True)}
        last = 3 if errors[2] else 2
        assert values(folder) == alone(last, BLOCKS if last == 3 else CHANNELS)
        assert (folder / "tokenizer.json").exists() == ("index" in what)
        if len(errors) == 1:
            break
        ends.append((errors[2], errors[3]))
    assert len({*ends}) == 3  # either is refused, or none
    assert ends.count((None, None)) == 1
    assert ends.count(((errno.EBUSY, True), None)) == 1


@pytest.mark.exhaustive
def test_threads_save_to_one_folder(alone: Any, tmp_path: Path) -> None:
    wholes = [alone(1, BLOCKS), alone(2, CHANNELS)]
    for _ in range(10):
        start, done = threading.Barrier(2), []

        def run(seed: int, how: Any, start: Any = start, done: Any = done) -> None:
            start.wait()
            with contextlib.suppress(OSError):
                save(seed, how, tmp_path)
                done.append(seed)

        threads = [threading.Thread(target=run, args=x) for x in ((1, BLOCKS), (2, CHANNELS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done
        assert values(tmp_path) in [wholes[seed - 1] for seed in done]


def test_a_file_system_without_locks(alone: Any, tmp_path: Path) -> None:
    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "no locks")):
        for seed in (1, 2):
            save(seed, BLOCKS, tmp_path)
            assert values(tmp_path) == alone(seed, BLOCKS)


@pytest.mark.parametrize("size", [500, 6000])
def test_a_full_disk_is_an_error_of_the_system(size: int, alone: Any, tmp_path: Path) -> None:
    """Of which safetensors makes one of its own; a limit on the size of files stands for it."""
    save(1, CHANNELS, tmp_path)
    before, limits = {*tmp_path.iterdir()}, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        with pytest.raises(OSError, match=str(tmp_path)) as caught:
            save(2, BLOCKS, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert {*tmp_path.iterdir()} == before
    assert values(tmp_path) == alone(1, CHANNELS)


@pytest.mark.parametrize("number", range(1, 5))
def test_a_disk_that_is_full_at_any_file(number: int, alone: Any, tmp_path: Path) -> None:
    """A shard, the index, or `config.json`; some file systems tell it late."""
    save(1, CHANNELS, tmp_path)
    before, fsync, calls = {*tmp_path.iterdir()}, os.fsync, []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) == number:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        fsync(file)

    with mock.patch.object(os, "fsync", full), pytest.raises(OSError, match="quota") as caught:
        save(2, BLOCKS, tmp_path)
    assert caught.value.errno == errno.EDQUOT
    assert str(tmp_path) in str(caught.value)
    assert {*tmp_path.iterdir()} == before
    assert values(tmp_path) == alone(1, CHANNELS)
