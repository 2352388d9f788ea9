"""The processes of one command: what they share, agree on and reduce. Alone, all of it is free.

One process per GPU. Flags and objects go through Gloo, so that no rank waits for its GPU to say
whether to stop. A rank that fails ends: others, which lose it, then raise a `RankFailedError`.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from float8_lab.device import use_device
from float8_lab.errors import ConfigError, RankFailedError

T = TypeVar("T")

# torch has no exception of its own for these: what Gloo and NCCL say when another rank is gone.
_SIGNS_OF_A_LOST_RANK = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "remote process exited",
)


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model together; by default this one alone.

    Each method with a "collective" in its description must be called by all ranks.
    """

    rank: int = 0  # of this process; the first one writes files and talks to the user
    size: int = 1

    def device(self, name: str) -> torch.device:
        """The device of this rank, made the current one; a `ConfigError` if it has none."""
        if name != "cuda" and not name.startswith("cpu") and self.size > 1:
            got = f"--device got {name!r}, but each of several ranks takes a GPU of its own"
            raise ConfigError(f"{got}: use --device cuda")
        return use_device(name)

    def share(self, count: int) -> slice:
        """Return this rank's share of `count` sequences; a `ConfigError` if others have more."""
        each, rest = divmod(count, self.size)
        if rest:
            got = f"--batch-size got {count} sequences for all ranks together"
            raise ConfigError(f"{got}, expected a multiple of the {self.size} ranks")
        return slice(self.rank * each, (self.rank + 1) * each)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over ranks, float64 if there are several; NaN if one is. Collective."""
        if self.size == 1:
            return values
        total = values.double()
        dist.all_reduce(total)
        return total / self.size

    def any(self, flag: bool) -> bool:
        """Return whether it holds on some rank; collective."""
        if self.size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def gather(self, value: T) -> list[T]:
        """The picklable `value` of every rank, by rank; collective."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def once(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank alone; its picklable result on all. Collective."""
        return self.gather(work() if self.rank == 0 else None)[0]  # type: ignore[return-value]


ALONE = Ranks()


def start_ranks(device: str, wanted: int | None) -> None:
    """Become `torchrun`, which runs this command on `wanted` processes; return on each of those.

    By default on all GPUs, or on two processes for the device "cpu".
    """
    if "RANK" in os.environ:
        return
    there = torch.cuda.device_count()
    count = wanted or (there if device == "cuda" else 2)
    if device == "cuda" and count > there:
        raise ConfigError(f"ranks: got {count}, but there are {there} GPUs here")
    threads = max(1, torch.get_num_threads() // count)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words += ["-m", "float8_lab.cli.main", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *words])


@contextlib.contextmanager
def join_ranks(spread: bool) -> Iterator[Ranks]:
    """Meet the other ranks that `torchrun` started, and part from them at the end.

    A `ConfigError` if `spread`, whether ranks share a model, and the environment do not fit. A
    group that is there already is used and left as it is; on GPUs it needs "cpu:gloo,cuda:nccl".
    After an error a group made here is not destroyed, which would wait for ranks that are gone.
    """
    if not spread:
        if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
            what = f"torchrun started {size} ranks, but not for --fsdp"
            raise ConfigError(f"{what}: add it, or start one")
        yield ALONE
        return
    ready = dist.is_initialized()
    if not ready and "RANK" not in os.environ:
        start = "torchrun --nproc-per-node N --no-python float8 train --fsdp ..."
        raise ConfigError(f"--fsdp needs ranks to share a model: start them by {start}")
    if not ready:
        # Both: tensors on GPUs and flags on CPUs have ways of their own.
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    with explain_lost_rank():
        yield ranks
        if not ready:
            ranks.any(False)  # None leaves while another one still needs it.
            dist.destroy_process_group()


@contextlib.contextmanager
def explain_lost_rank() -> Iterator[None]:
    """Turn the errors of broken connections into `RankFailedError`."""
    try:
        yield
    except RuntimeError as error:  # An OSError is never torch's: it is of a file or an observer.
        if any(sign in str(error) for sign in _SIGNS_OF_A_LOST_RANK):
            message = "another rank is gone: see its own error, or else what torchrun says of it"
            raise RankFailedError(message) from error
        raise
