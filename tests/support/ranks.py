"""Running functions on several ranks: CPU processes that talk through Gloo.

The processes stay alive between tests, so that a test costs no import. A rank that raises, dies or
hangs ends them all; the error is the first one that any rank met.
"""

import faulthandler
import importlib.util
import inspect
import itertools
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

TIMEOUT = 100.0
"""Seconds that one function may take, on a machine that does other things too."""

PRELOAD = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "float8",
]
"""What is imported once for all processes: installed packages only, the server finds no others."""

_number = itertools.count()


class RankError(AssertionError):
    """What the first rank that failed had to say."""


class Ranks:
    """`size` processes with one process group, `cpu` and Gloo."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """`function(*args)` on every rank at once; what they return, by rank.

        Args:
            function: at the top level of a module; each rank finds it there by name.
            args: picklable.
            timeout: seconds.
        """
        if not self._processes:
            self._start()
        where = (inspect.getfile(function), function.__name__)
        for pipe in self._pipes:
            pipe.send((where, args, timeout))
        try:
            return self._results(time.monotonic() + timeout)
        except BaseException:
            self.stop()  # the others wait for the one that failed
            raise

    def stop(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        # A server that has imported everything once and never ran anything: forks of it start at
        # once and inherit no threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.size, str(store)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _results(self, deadline: float) -> list[Any]:
        results: dict[Connection, Any] = {}
        while waiting := [pipe for pipe in self._pipes if pipe not in results]:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = [self._pipes.index(pipe) for pipe in waiting]
                raise TimeoutError(f"ranks {ranks} did not return in time; stacks are on stderr")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    raise RankError(f"rank {rank} died") from None
                if not ok:
                    raise RankError(f"rank {rank} of {self.size}:\n{value}")
                results[pipe] = value
        return [results[pipe] for pipe in self._pipes]


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=10 * TIMEOUT),  # ours comes first, and says more
    )
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            (file, name), args, timeout = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.95 * timeout, file=sys.__stderr__)
        try:
            if file not in modules:
                modules[file] = _load(file)
            torch.manual_seed(0)
            result = (True, getattr(modules[file], name)(*args))
        except BaseException:
            result = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send(result)


def _load(file: str) -> ModuleType:
    name = f"on_ranks_{next(_number)}_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
