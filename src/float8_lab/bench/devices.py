"""The device that is measured, and how much data outgrows its caches."""

from __future__ import annotations

import torch

from float8.formats import lacks_float8_gemm

_CACHE_MULTIPLE = 4
_MOST_SETS = 64


def bench_device(name: str) -> torch.device:
    """The device called `name`, `"cuda"`, `"cuda:N"` or `"cpu"`.

    Raises:
        ValueError: It is not there, or has no float8 GEMMs.
    """
    device = torch.device(name)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device: got {name!r}, expected cuda, cuda:N or cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "no CUDA GPU here: run this on a machine with one, or add --device cpu to try the "
                "command with host times"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device: got {name!r}, but there are {torch.cuda.device_count()}")
        device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        torch.cuda.set_device(device)
    reason = lacks_float8_gemm(device)
    if reason is not None:
        raise ValueError(reason)
    return device


def input_sets(set_bytes: int, device: torch.device) -> int:
    """How many input sets of `set_bytes` outgrow the L2 cache several times; at least 2."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(_MOST_SETS, -(-_CACHE_MULTIPLE * cache // set_bytes)))
