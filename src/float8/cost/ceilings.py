"""The constants of the cost model, one entry per device.

All but the bandwidth are fitted to measured GEMMs by `benchmarks/fit_ceilings.py`, which reads what
`float8 bench matmul -o FILE.json` wrote and prints the fields: from
`benchmarks/results/h100-matmul.json` and `h200-matmul.json`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ceilings:
    """What one kind of device can do.

    Attributes:
        name: What it is called in tables and on the command line.
        pattern: Regular expression that the name of the device, as CUDA reports it, contains.
        copy_tb_per_s: Bandwidth of a device copy, bytes read and written, in TB/s.
        bf16_tflops: Rate of a bf16 GEMM without the two losses below, in TFLOP/s. One for all
            sizes: large GEMMs are slower, for the power limit, and some medium ones faster.
        float8_tflops: The same of a float8 GEMM.
        exposed: Share of the time to read operands and write the result at `copy_tb_per_s` that a
            GEMM does not hide behind its computation.
        kernel_us: Fixed time of one kernel, in microseconds.
    """

    name: str
    pattern: str
    copy_tb_per_s: float
    bf16_tflops: float
    float8_tflops: float
    exposed: float
    kernel_us: float


KNOWN: dict[str, Ceilings] = {
    "h100": Ceilings(
        name="h100",
        pattern=r"H100.*HBM3|H100 SXM",
        copy_tb_per_s=3.02,
        bf16_tflops=750.0,
        float8_tflops=1380.0,
        exposed=0.3,
        kernel_us=3.5,
    ),
    # Slower than an H100 at large GEMMs: its power limit is the same, its memory draws more.
    "h200": Ceilings(
        name="h200",
        pattern=r"H200",
        copy_tb_per_s=4.3,
        bf16_tflops=670.0,
        float8_tflops=1270.0,
        exposed=0.3,
        kernel_us=3.5,
    ),
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
