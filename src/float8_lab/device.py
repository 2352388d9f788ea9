"""Devices of this machine: by name, and the time of steps on them."""

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import torch

from float8.formats import lacks_float8_gemm
from float8_lab.errors import ConfigError, FailedError


def check_device(name: str) -> torch.device:
    """The device of that name; a `ConfigError` if it means nothing or is not there."""
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", name):
        raise ConfigError(f"unknown device {name!r}: use cpu, cuda or cuda:N")
    device, gpus = torch.device(name), torch.cuda.device_count()
    if (device.index or 0) >= {"cpu": 1, "cuda": gpus}[device.type]:
        hint = f"PyTorch sees {gpus} CUDA GPU(s)" if gpus else "no CUDA GPU here, use --device cpu"
        raise ConfigError(f"device {name!r} is not there: {hint}")
    return device


def use_device(name: str) -> torch.device:
    """The device of that name, made the current one; a `ConfigError` as `check_device`."""
    device = check_device(name)
    if device.type == "cuda":
        if ":" not in name:  # who made a group of ranks without torchrun has chosen one, too
            here = os.environ.get("LOCAL_RANK") or torch.cuda.current_device()
            device = check_device(f"cuda:{here}")
        torch.cuda.set_device(device)
    return device


def float8_device(name: str) -> torch.device:
    """The device of that name, made the current one; a `ConfigError` if it has no float8 GEMMs."""
    device = use_device(name)
    if reason := lacks_float8_gemm(device):
        raise ConfigError(reason)
    return device


class Clock:
    """Points in time, which are read all at once: wall time on the CPU, CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note that the device gets here now."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def collect(self) -> list[float]:
        """Seconds between marks since the last call, oldest first; waits for the device."""
        marks, self._marks = self._marks, []
        if self._cuda and marks:
            marks[-1].synchronize()
        pairs = itertools.pairwise(marks)
        return [a.elapsed_time(b) / 1e3 if self._cuda else b - a for a, b in pairs]


# torch has no exception of its own for these.
_SIGNS_OF_TOO_MUCH = ["DefaultCPUAllocator: ", "Storage size calculation overflowed"]
_SIGNS_OF_TOO_MUCH += ["integer multiplication overflow"]


@contextlib.contextmanager
def explain_out_of_memory(message: str) -> Iterator[None]:
    """Turn what says that memory is short into a `LabError`; `{error}` stands for what it says."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_memory_error = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_memory_error and not any(sign in str(error) for sign in _SIGNS_OF_TOO_MUCH):
            raise
        raise FailedError(message.replace("{error}", str(error))) from error
