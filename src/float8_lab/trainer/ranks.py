"""The processes of one run: what they share, agree on and reduce. Alone, all of it is free.

One process per GPU, started by `torchrun`. Numbers for the log are reduced where they are; flags
and objects travel through Gloo, so that no rank waits for its GPU to say whether to stop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from float8_lab.trainer.device import check_device
from float8_lab.trainer.errors import ConfigError, LostRankError, OtherRankError

T = TypeVar("T")

LAUNCH = "torchrun --nproc-per-node {ranks} --no-python float8 train --fsdp"
"""How a run on several ranks is started."""

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

    Attributes:
        rank: Number of this process.
        size: How many there are.
        sharded: Whether the model is sharded over them, which a single rank can do, too.
    """

    rank: int = 0
    size: int = 1
    sharded: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files and talks to the user."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of this rank, made the current one.

        Raises:
            ConfigError: (a `ValueError`) if there is no such device, or `name` asks several
                ranks to share one GPU.
        """
        device = check_device(name)
        if device.type == "cpu":
            return device
        if not self.sharded:
            if device.index is not None:
                torch.cuda.set_device(device)
            return device
        if name == "cuda":
            # Who made the group without torchrun has chosen the device, too.
            index = os.environ.get("LOCAL_RANK") or torch.cuda.current_device()
            device = check_device(f"cuda:{index}")
        elif self.size > 1:
            raise ConfigError(
                f"--device got {name!r}, but with --fsdp each rank takes a GPU of its own: "
                "use --device cuda"
            )
        torch.cuda.set_device(device)
        return device

    def check_fits(self, batch_size: int, replicas: int) -> None:
        """Make sure that what is divided among the ranks comes out even.

        Args:
            batch_size: Sequences per forward pass, of all ranks together.
            replicas: Of the sharded model.

        Raises:
            ConfigError: (a `ValueError`) if it does not.
        """
        if batch_size % self.size:
            fitting = max(batch_size // self.size, 1) * self.size
            raise ConfigError(
                f"--batch-size got {batch_size} sequences for all ranks together, expected a "
                f"multiple of the {self.size} ranks: use for example {fitting}"
            )
        if self.size % replicas:
            fitting_replicas = [str(n) for n in range(1, self.size + 1) if self.size % n == 0]
            raise ConfigError(
                f"--hsdp got {replicas} replicas, expected a divisor of the {self.size} ranks: "
                f"use one of {', '.join(fitting_replicas)}"
            )

    def share(self, count: int) -> slice:
        """Which of `count` sequences, a multiple of `size`, are this rank's: each has as many."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over ranks; collective.

        Args:
            values: any shape, on this rank's device.

        Returns:
            The same shape, float64 if there are several ranks. NaN if it is NaN on any rank.
        """
        if self.size == 1:
            return values
        total = values.double()
        dist.all_reduce(total)
        return total / self.size

    def max(self, value: int | None) -> int | None:
        """The largest, None if a rank knows none; collective."""
        known = [each for each in self.gather(value) if each is not None]
        return max(known) if len(known) == self.size else None

    def any(self, flag: bool) -> bool:
        """Whether it holds on some rank; collective."""
        if self.size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def gather(self, value: T) -> list[T]:
        """The picklable `value` of every rank, by rank; collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], T]) -> T:
        """Run what may fail and communicates nothing; if it fails on one rank, fail on all.

        Collective.

        Raises:
            Exception: what `work` raised, on the first rank where it did.
            OtherRankError: On the other ranks.
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        failed = [rank for rank, bad in enumerate(self.gather(error is not None)) if bad]
        if not failed:
            return result
        if error is not None and self.rank == failed[0]:
            raise error
        raise OtherRankError(f"rank {failed[0]} failed, and said why") from error

    def once(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank alone; its picklable result on all. Collective.

        Raises:
            Exception: what `work` raised, on the first rank.
            OtherRankError: On the other ranks.
        """
        return self.gather(self.together(lambda: work() if self.is_first else None))[0]  # type: ignore[return-value]


ALONE = Ranks()
"""One process, nothing sharded."""


@contextlib.contextmanager
def join_ranks(fsdp: bool) -> Iterator[Ranks]:
    """Meet the other ranks that `torchrun` started, and part from them at the end.

    A process group that is there already is used and left as it is; on GPUs it needs a backend for
    CPU tensors too, "cpu:gloo,cuda:nccl". After an error a group made here is not destroyed, which
    would wait for ranks that are gone: end the process soon.

    Args:
        fsdp: Whether the model is to be sharded.

    Raises:
        ConfigError: (a `ValueError`) if `fsdp` and the environment do not fit; `OtherRankError`
            on all ranks but the first.
        LostRankError: If another rank ended before this one.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if not fsdp:
        if size > 1:
            refuse(f"torchrun started {size} ranks, but not for --fsdp: add it, or start one")
        yield ALONE
        return
    ready = dist.is_available() and dist.is_initialized()
    if not ready and "RANK" not in os.environ:
        refuse(
            "--fsdp needs ranks to shard over, expected to be started by torchrun: use "
            f"{LAUNCH.format(ranks=max(torch.cuda.device_count(), 2))} ..."
        )
    if not ready:
        # Both: tensors on GPUs and flags on CPUs have ways of their own.
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), sharded=True)
    with explain_lost_rank():
        yield ranks
        if not ready:
            ranks.any(False)  # None leaves while another one still needs it.
            dist.destroy_process_group()


def refuse(message: str) -> None:
    """Raise what all ranks find wrong in the same way, before they can talk to each other.

    Raises:
        ConfigError: (a `ValueError`) on the first rank, or without any.
        OtherRankError: On all others.
    """
    if os.environ.get("RANK", "0") == "0":
        raise ConfigError(message)
    raise OtherRankError("rank 0 says what is wrong")


@contextlib.contextmanager
def explain_lost_rank() -> Iterator[None]:
    """Turn the errors of broken connections into `LostRankError`.

    Raises:
        LostRankError: For such an error.
    """
    try:
        yield
    except RuntimeError as error:  # An OSError is never torch's: it is of a file or an observer.
        if any(sign in str(error) for sign in _SIGNS_OF_A_LOST_RANK):
            raise LostRankError(
                "another rank is gone: see its own error, or else what torchrun says of it"
            ) from error
        raise
