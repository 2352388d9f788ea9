"""Processes that make up a process group for one benchmark: they end together, in time."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from float8.convert.measure import WrongResultError

COLLECTIVE_TIMEOUT = 180.0
"""Seconds that a rank waits for the others in one collective; they compile at the same time."""

Report = Callable[[Any], None]
"""Sends a picklable object to the parent."""

Work = Callable[..., None]
"""What a rank does, `work(report, device, *args)`: at the top level of a module."""

_LAST_WORDS = 1.0
"""Seconds that others have to fail too, once a rank has: the first one is shown."""

_REPORT, _DONE, _WRONG, _FAILED = "report", "done", "wrong result", "failed"


class RankFailedError(RuntimeError):
    """What the first rank that failed had to say."""


def rank_count(device_type: str, wanted: int | None) -> int:
    """How many ranks a benchmark runs on.

    Args:
        device_type: `cuda` or `cpu`.
        wanted: None: all GPUs, or two processes on a CPU.

    Raises:
        ValueError: There are not as many GPUs, or another launcher started this process.
    """
    if "RANK" in os.environ:
        raise ValueError(
            "ranks: got RANK in the environment, as under torchrun; this command starts its ranks "
            "itself: run it without a launcher, and say how many with --ranks"
        )
    if device_type != "cuda":
        return 2 if wanted is None else wanted
    there = torch.cuda.device_count()
    if wanted is not None and wanted > there:
        raise ValueError(f"ranks: got {wanted}, but there are {there} GPUs here")
    return there if wanted is None else wanted


def run_ranks(
    work: Work, args: tuple[Any, ...], ranks: int, device_type: str, *, timeout: float | None = None
) -> Iterator[Any]:
    """Run `work` on new processes, each with its device and a process group of all; its reports.

    NCCL on CUDA, Gloo on a CPU. Whatever ends this iterator ends the processes.

    Args:
        work: Called as `work(report, device, *args)` on every rank.
        args: Picklable.
        ranks: How many.
        device_type: `cuda` or `cpu`.
        timeout: Seconds in one collective; None: `COLLECTIVE_TIMEOUT`.

    Yields:
        What ranks report, in the order in which it comes.

    Raises:
        WrongResultError: That of the first rank which raised one, if it failed first.
        RankFailedError: A rank failed otherwise or died; the first one that did says why.
    """
    # Spawned, for a fork has no use of CUDA once the parent has.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        seconds = COLLECTIVE_TIMEOUT if timeout is None else timeout
        processes, pipes = [], []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                place = (rank, ranks, device_type, store, seconds)
                process = context.Process(
                    target=_serve, args=(theirs, place, work, args), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            yield from _reports(processes, pipes)
            for process in processes:
                process.join(10)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _reports(processes: list[Any], pipes: list[Connection]) -> Iterator[Any]:
    """What comes, until all are done or one has failed and the others had a moment to say so."""
    open_pipes, failures = list(pipes), list[tuple[float, int, str, str]]()
    while open_pipes:
        ready = wait(open_pipes, _LAST_WORDS if failures else None)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                kind, when, value = pipe.recv()
            except (EOFError, ConnectionError):
                # That is why others fail, even if they were quicker to say that they do.
                processes[rank].join(_LAST_WORDS)
                code = processes[rank].exitcode
                kind, when, value = _FAILED, 0.0, f"died without a word, exit code {code}"
            if kind == _REPORT:
                yield value
                continue
            open_pipes.remove(pipe)
            if kind != _DONE:
                failures.append((when, rank, kind, value))
    if failures:
        _, rank, kind, value = min(failures)
        if kind == _WRONG:
            raise WrongResultError(value)
        raise RankFailedError(f"rank {rank} of {len(pipes)}: {value}")


def _serve(
    pipe: Connection, place: tuple[int, int, str, str, float], work: Work, args: tuple[Any, ...]
) -> None:
    """The life of one rank."""

    def send(kind: str, value: Any) -> None:
        pipe.send((kind, time.time(), value))

    rank, ranks, device_type, store, seconds = place
    try:
        device = _device(rank, ranks, device_type)
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=seconds),
            device_id=device if device_type == "cuda" else None,
        )
        work(lambda value: send(_REPORT, value), device, *args)
        dist.barrier()
        dist.destroy_process_group()
        send(_DONE, None)
    except WrongResultError as error:
        _fail(send, _WRONG, str(error))
    except BaseException as error:
        sys.stderr.write(f"rank {rank}:\n{traceback.format_exc()}")
        _fail(send, _FAILED, f"{type(error).__name__}: {error}")


def _device(rank: int, ranks: int, device_type: str) -> torch.device:
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    return torch.device("cpu")


def _fail(send: Callable[[str, Any], None], kind: str, value: str) -> NoReturn:
    """Say it, and end at once: leaving a process group in order would wait for the others."""
    try:
        send(kind, value)
    finally:
        sys.stderr.flush()
        os._exit(1)
