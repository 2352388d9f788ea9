"""What a device can do at best: the constants of the cost model, one entry per device.

The rates are fitted to measured GEMMs by `benchmarks/fit_ceilings.py`, which reads what
`float8 bench matmul --shapes square --shapes llama3-8b -o FILE.json` wrote and prints the entry.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Ceilings:
    """The limits of one kind of device.

    Attributes:
        name: What it is called in tables and on the command line.
        pattern: Regular expression that the name of the device, as CUDA reports it, contains.
        copy_tb_per_s: Bandwidth of a device copy, bytes read and written, in TB/s.
        bf16_tflops: Rate of a bf16 GEMM without the losses below.
        float8_tflops: The same of a float8 GEMM.
        processors: Streaming multiprocessors: as many output tiles are at work at a time.
        tile: Rows and columns of one output tile.
        bf16_fill: Length of K that filling and draining a tile's pipeline is worth, in bf16.
        float8_fill: The same in float8.
        kernel_us: Fixed time of one kernel, in microseconds.
    """

    name: str
    pattern: str
    copy_tb_per_s: float
    bf16_tflops: float
    float8_tflops: float
    processors: int
    tile: tuple[int, int]
    bf16_fill: int
    float8_fill: int
    kernel_us: float


_H100 = Ceilings(
    name="h100",
    pattern=r"H100.*HBM3|H100 SXM",
    copy_tb_per_s=3.02,
    bf16_tflops=770.0,
    float8_tflops=1520.0,
    processors=132,
    tile=(128, 256),
    bf16_fill=300,
    float8_fill=800,
    kernel_us=4.0,
)

KNOWN: dict[str, Ceilings] = {
    "h100": _H100,
    # Not measured: the compute of an H100, with faster memory.
    "h200": replace(_H100, name="h200", pattern=r"H200", copy_tb_per_s=4.3),
}


def ceilings_of(device: torch.device) -> Ceilings | None:
    """The ceilings of a device; None if it is not known, as any CPU."""
    if device.type != "cuda":
        return None
    return ceilings_by_device_name(torch.cuda.get_device_name(device))


@functools.cache
def ceilings_by_device_name(device_name: str) -> Ceilings | None:
    """The ceilings of a device by the name that CUDA gives it; None if it is not known."""
    matches = (c for c in KNOWN.values() if re.search(c.pattern, device_name))
    return next(matches, None)
