"""What ranks of a benchmark do in tests of their end; each process finds it here by name."""

import os
import time

import torch
import torch.distributed as dist

from float8.convert.measure import WrongResultError


def fail(report, device: torch.device, how: str) -> None:
    """Rank 1 does, while rank 0 waits for it."""
    report(how)
    if dist.get_rank() == 1:
        if how == "raises":
            raise KeyError("lost")
        if how == "wrong":
            raise WrongResultError("all zeros")
        if how == "dies":
            os._exit(3)
        time.sleep(600)
    dist.barrier()
