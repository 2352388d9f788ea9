"""Processes that make up a process group for one benchmark: they end together, in time."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from float8.convert.measure import WrongResultError
from float8_lab.errors import ConfigError, RankFailedError

COLLECTIVE_TIMEOUT = 180.0
"""Seconds that a rank waits for the others in one collective; they compile at the same time."""

Report = Callable[[Any], None]
"""Sends a picklable object to the parent."""

Work = Callable[..., None]
"""What a rank does, `work(report, device, *args)`: at the top level of a module."""

_LAST_WORDS = 1.0
"""Seconds by which a rank that fails outlives its error: those it fails have not ended by then."""


def rank_count(device_type: str, wanted: int | None) -> int:
    """How many ranks a benchmark runs on: by default all GPUs, or two processes on a CPU."""
    if "RANK" in os.environ:
        raise ConfigError(
            "ranks: got RANK in the environment, as under torchrun; this command starts its ranks "
            "itself: run it without a launcher, and say how many with --ranks"
        )
    there = torch.cuda.device_count()
    if wanted is None:
        return there if device_type == "cuda" else 2
    if device_type == "cuda" and wanted > there:
        raise ConfigError(f"ranks: got {wanted}, but there are {there} GPUs here")
    return wanted


def run_ranks(
    work: Work,
    args: tuple[Any, ...],
    ranks: int,
    device_type: str,
    *,
    timeout: float = COLLECTIVE_TIMEOUT,
) -> Iterator[Any]:
    """Run `work` on new processes, each with its device and a process group of all; its reports.

    NCCL on CUDA, Gloo on a CPU. Whatever ends this iterator ends the processes. It yields what
    ranks report, in the order in which it comes.

    Raises:
        WrongResultError: That of the first rank which raised one, if it failed first.
        RankFailedError: A rank failed otherwise or died; the first one that did says why.
    """
    reports = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        place = (ranks, device_type, f"file://{folder}/store", timeout)
        # Spawned, for a fork has no use of CUDA once the parent has.
        context = start_processes(  # type: ignore[no-untyped-call]
            _serve, (place, reports, work, args), ranks, join=False, daemon=True
        )
        try:
            ended = False
            while not ended:
                death = None
                try:
                    ended = context.join(timeout=0.1)
                except ProcessExitedException as error:
                    death, ended = error, True
                while not reports.empty():
                    report = reports.get()
                    if isinstance(report, Exception):
                        raise report
                    yield report
                if death is not None:
                    raise RankFailedError(
                        f"rank {death.error_index} of {ranks}: died without a word, "
                        f"exit code {death.exit_code}"
                    )
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _serve(
    rank: int, place: tuple[int, str, str, float], reports: Any, work: Work, args: tuple[Any, ...]
) -> None:
    """The life of one rank. It ends at once: an orderly end would wait for those that are gone."""
    ranks, device_type, store, timeout = place
    cuda = device_type == "cuda"
    try:
        device = torch.device(f"cuda:{rank}" if cuda else "cpu")
        if cuda:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
            device_id=device if cuda else None,
        )
        work(reports.put, device, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        time.sleep(_LAST_WORDS)
        told: Exception = RankFailedError(
            f"rank {rank} of {ranks}: {type(error).__name__}: {error}"
        )
        if isinstance(error, WrongResultError):
            told = WrongResultError(str(error))
        else:
            traceback.print_exc()
        reports.put(told)
        os._exit(1)
