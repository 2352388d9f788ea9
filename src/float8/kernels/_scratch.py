"""Memory that one kernel leaves for the next one."""

import threading

import torch
from torch import Tensor

_LENGTH = 4096


class _Buffers(threading.local):
    """One buffer per device and stream, for each thread: launches of threads may interleave."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], Tensor] = {}


_buffers = _Buffers()


def scratch(length: int, device: torch.device) -> Tensor:
    """At least `length` float32 on `device`, to be read by the next kernel of this stream only.

    The same memory every time, since allocating costs eager mode as much as launching does. Not
    while a CUDA graph is captured: two graphs may run at once, so each gets memory of its own.
    """
    if device.type != "cuda" or length > _LENGTH or torch._C._cuda_isCurrentStreamCapturing():
        return torch.empty(length, dtype=torch.float32, device=device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    buffer = _buffers.by_stream.get(key)
    if buffer is None:
        buffer = torch.empty(_LENGTH, dtype=torch.float32, device=device)
        _buffers.by_stream[key] = buffer
    return buffer
