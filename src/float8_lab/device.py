"""Devices of this machine: by name, and the time and memory of steps on them."""

import contextlib
import ctypes
import gc
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from float8.formats import lacks_float8_gemm
from float8_lab.errors import ConfigError, OutOfMemoryError, for_all, is_for_all


def check_device(name: str) -> torch.device:
    """The device of that name; a `ConfigError` if it means nothing or is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use cpu, cuda or cuda:N") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = {"cpu": 1, "cuda": gpus}
    if device.type not in there:
        raise ConfigError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    if (device.index or 0) >= there[device.type]:
        hint = "there is one CPU device, use cpu"
        if device.type == "cuda":
            none = "no CUDA GPU here, use --device cpu"
            hint = f"PyTorch sees {gpus} CUDA device(s)" if gpus else none
        raise ConfigError(f"device {name!r} is not there: {hint}")
    return device


def float8_device(name: str) -> torch.device:
    """The device of that name, made the current one; a `ConfigError` if it has no float8 GEMMs."""
    device = check_device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if reason := lacks_float8_gemm(device):
        raise ConfigError(reason)
    return device


class Clock:
    """Points in time: wall time on the CPU, CUDA events on a GPU.

    Events are read later and all at once, so marking a time does not wait for the device.
    """

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
_SIGNS_OF_TOO_MUCH = (
    "DefaultCPUAllocator: ",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
)


@contextlib.contextmanager
def explain_out_of_memory(message: str) -> Iterator[None]:
    """Turn what says that a device has too little memory, or nothing so much, into a `LabError`.

    `{error}` in the message stands for what it says.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and not any(sign in str(error) for sign in _SIGNS_OF_TOO_MUCH):
            raise
        message = message.replace("{error}", str(error))
        raise for_all(OutOfMemoryError(message), is_for_all(error)) from error


def total_memory(device: torch.device) -> int:
    """Bytes of memory that `device` has, of this machine for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """Peak memory of what happens after `__init__`.

    On CUDA the highest number of bytes that tensors held at once. On the CPU the growth of the
    process's peak resident memory, which Linux can measure per run; elsewhere not at all.

    Attributes:
        note: What the number means, or why there is none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._resident: int | None = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.note = "highest torch.cuda.max_memory_allocated"
            return
        self.note = "not measured: the peak of a CPU run can only be told apart on Linux"
        # Give freed memory back to the system, or an earlier run's would hide this one's growth.
        with contextlib.suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc only
        with contextlib.suppress(OSError, IndexError):
            # Writing 5 sets the process's recorded peak back to what it holds now: see proc(5).
            Path("/proc/self/clear_refs").write_text("5")
            resident = _status_bytes("VmRSS")
            if _status_bytes("VmHWM") <= resident + (64 << 20):
                self._resident = resident
                self.note = "growth of the process's peak resident memory"

    def read(self) -> int | None:
        """Bytes, or None if this machine cannot tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._resident is None:
            return None
        return max(_status_bytes("VmHWM") - self._resident, 0)


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024
