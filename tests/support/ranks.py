"""Running functions on several ranks: CPU processes that talk through Gloo, or GPUs through NCCL.

The processes stay alive between tests, so that a test costs no import. A rank that raises, dies or
hangs ends them all; the error is the first one that any rank met.
"""

import faulthandler
import functools
import gc
import importlib.util
import inspect
import itertools
import multiprocessing
import operator
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

HANGS = 1200.0
"""Seconds after which a process hangs for sure: no test depends on how busy the machine is. Below
pytest's own limit, so that it is ended and says where; and below the half hour that collectives
wait for a rank that is gone."""
PRELOAD = [
    "pytest",
    "torch._dynamo.testing",
    "torch._inductor.compile_fx",
    "torch.export._trace",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.nn.parallel",
    "float8",
    "transformers.modeling_utils",
]
"""What is imported once for all processes: installed packages only, the server finds no others."""

SELDOM = 50_000, 20, 20
"""When garbage is collected where no GPU's memory waits for it: compilers make much of it."""

_number = itertools.count()
P = ParamSpec("P")
T = TypeVar("T")


class RankError(AssertionError):
    """What the first rank that failed had to say."""


class Ranks:
    """`size` processes with one process group.

    Args:
        size: how many.
        device_type: `cpu`, with Gloo; or `cuda`, with NCCL: rank n has GPU n, or shares one where
            there are fewer.
        collective_timeout: seconds that a rank waits for others in one collective. None: so long
            that the next one comes first, which says more.
        timeout: seconds that one function may take.
    """

    def __init__(
        self,
        size: int,
        device_type: str = "cpu",
        collective_timeout: float | None = None,
        timeout: float = HANGS,
    ) -> None:
        self.size, self.device_type, self.timeout = size, device_type, timeout
        self._collective_timeout = collective_timeout or 10 * HANGS
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """`function(*args, **kwargs)` on every rank at once; what they return, by rank.

        Args:
            function: at the top level of a module; each rank finds it there by name.
            args, kwargs: picklable.
        """
        self._send(function, args, kwargs)
        results: list[Any] = [None] * self.size
        try:
            for rank, ok, value in self._ended():
                if not ok:
                    how = value if value == "died" else f"of {self.size}:\n{value}"
                    raise RankError(f"rank {rank} {how}")
                results[rank] = value
        except BaseException:
            self.stop()  # the others wait for the one that failed
            raise
        return results

    def endings(self, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> list[str]:
        """`function(*args, **kwargs)` on every rank; how each ends, by rank, none cut short.

        `returned`, `died`, or the traceback of what it raised; all processes are ended then.

        Raises:
            TimeoutError: some rank hangs.
        """
        self._send(function, args, kwargs)
        try:
            ended = sorted(self._ended(), key=operator.itemgetter(0))
        finally:
            self.stop()
        return ["returned" if ok else value for _, ok, value in ended]

    def _send(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if not self._processes:
            self._start()
        where = (inspect.getfile(function), function.__name__)
        for pipe in self._pipes:
            pipe.send((where, args, kwargs, self.timeout))

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
        if self.device_type == "cpu":
            # A server that has imported everything once and never ran anything: forks of it start
            # at once and inherit no threads.
            context: Any = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOAD)
        else:
            # A fork has no use of CUDA if anything that was imported has looked for a GPU.
            context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = f"file://{Path(self._folder.name) / 'store'}"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            place = (rank, self.size, self.device_type, store, self._collective_timeout)
            process = context.Process(target=_serve, args=(theirs, place), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _ended(self) -> Iterator[tuple[int, bool, Any]]:
        """Yield each rank that ends, whether it returned, and what, or else the reason."""
        deadline = time.monotonic() + self.timeout
        waiting: dict[Any, int] = dict(zip(self._pipes, range(self.size), strict=True))
        while waiting:
            ready: list[Any] = wait([*waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = [*waiting.values()]
                raise TimeoutError(f"ranks {ranks} did not return in time; stacks are on stderr")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    yield rank, *pipe.recv()
                except (EOFError, ConnectionError):
                    yield rank, False, "died"


def on(ranks: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that is to run on every rank of a fixture: `two`, `four`, `either`.

    Its arguments are those of the test, but for the fixture.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def test(**given: Any) -> None:
            given[ranks].run(function, *(given[name] for name in parameters))

        fixture = inspect.Parameter(ranks, inspect.Parameter.KEYWORD_ONLY)
        keywords = (p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters.values())
        test.__signature__ = inspect.Signature([fixture, *keywords])  # type: ignore[attr-defined]
        test.on_each_rank = function  # type: ignore[attr-defined]
        return test

    return made


def _serve(pipe: Connection, place: tuple[int, int, str, str, float]) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable(file=sys.__stderr__)  # a rank that crashes says where
    rank, size, device_type, store, timeout = place
    gpu = None
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        if gpus < size:  # NCCL refuses ranks of one host that share a GPU
            os.environ["NCCL_HOSTID"] = f"rank {rank}"
        gpu = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(gpu)
    torch.set_num_threads(1)
    if gpu is None:
        gc.set_threshold(*SELDOM)
    dist.init_process_group(
        "gloo" if gpu is None else "nccl",
        init_method=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=gpu,
    )
    dist.barrier()  # so that no rank ends while another one still connects to it
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            (file, name), args, kwargs, timeout = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.95 * timeout, file=sys.__stderr__)
        try:
            if file not in modules:
                modules[file] = _load(file)
                if gpu is None:
                    gc.freeze()  # runs collect garbage: only that of their own
            torch.manual_seed(0)
            found = getattr(modules[file], name)
            result = (True, getattr(found, "on_each_rank", found)(*args, **kwargs))
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
