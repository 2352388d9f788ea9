"""The processes of one benchmark, one per GPU: how they start, meet and part.

A rank that fails ends: others, which lose it, then raise a `RankFailedError`.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from float8_lab.errors import ConfigError, RankFailedError

# torch has no exception of its own for these: what Gloo and NCCL say when another rank is gone.
_SIGNS_OF_A_LOST_RANK = ["Connection closed by peer", "Connection reset by peer", "Broken pipe"]
_SIGNS_OF_A_LOST_RANK += ["Connection refused", "remote process exited"]


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
def join_ranks() -> Iterator[None]:
    """Meet the other ranks that `torchrun` started, and part from them at the end.

    Errors of broken connections become a `RankFailedError`. A group that is there already, on GPUs
    of "cpu:gloo,cuda:nccl", is used and left as it is. After an error none is destroyed.
    """
    if not (ready := dist.is_initialized()):
        # Both: tensors on GPUs and on CPUs have ways of their own.
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
        if not ready:
            dist.all_reduce(torch.zeros(1))  # None leaves while another one still needs it.
            dist.destroy_process_group()
    except RuntimeError as error:  # An OSError is never torch's: it is of a file.
        if any(sign in str(error) for sign in _SIGNS_OF_A_LOST_RANK):
            message = "another rank is gone: see its own error, or else what torchrun says of it"
            raise RankFailedError(message) from error
        raise
