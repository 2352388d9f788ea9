"""Time and memory of training steps, measured without making the device wait."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import torch


class StepTimer:
    """Durations of steps: wall time on the CPU, time between CUDA events on a GPU.

    Events are read later and all at once, so timing a step does not wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """A step begins, or the one begun last ends."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def collect(self) -> list[float]:
        """Seconds of every step since the last call, oldest first; waits for the device."""
        marks, self._marks = self._marks, []
        steps = list(zip(marks[::2], marks[1::2], strict=False))
        if not self._cuda:
            return [end - begin for begin, end in steps]
        if steps:
            steps[-1][1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in steps]


class PeakMemory:
    """Peak memory of what happens after `__init__`.

    On CUDA the highest number of bytes that tensors held at once. On the CPU the growth of the
    process's peak resident memory, which Linux can measure per run; elsewhere not at all.

    Attributes:
        note: What the number means, or why there is none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._resident = 0
        self._known = True
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.note = "highest torch.cuda.max_memory_allocated"
            return
        self.note = "growth of the process's peak resident memory"
        # Give freed memory back to the system, or an earlier run's would hide this one's growth.
        with contextlib.suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc only
        try:
            # Writing 5 sets the process's recorded peak back to what it holds now: see proc(5).
            Path("/proc/self/clear_refs").write_text("5")
            self._resident = _status_bytes("VmRSS")
            self._known = _status_bytes("VmHWM") <= self._resident + (64 << 20)
        except (OSError, ValueError):
            self._known = False
        if not self._known:
            self.note = "not measured: the peak of a CPU run can only be told apart on Linux"

    def read(self) -> int | None:
        """Bytes, or None if this machine cannot tell."""
        if not self._known:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(_status_bytes("VmHWM") - self._resident, 0)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {name} in /proc/self/status")
