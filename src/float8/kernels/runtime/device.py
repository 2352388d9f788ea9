"""Properties of a device that launch configurations depend on, asked for once per device."""

import functools
from contextlib import AbstractContextManager, nullcontext

import torch

from float8.kernels.runtime.triton import interpreting


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, on which Triton launches; do nothing for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def sm_count(device: torch.device) -> int:
    """Count the multiprocessors of a GPU; 4 for the CPU, where Triton's interpreter runs."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_float8_conversion(device: torch.device) -> bool:
    """Tell whether Triton may convert float32 to float8 on ``device`` by instruction.

    NVIDIA GPUs have it from compute capability 9.0 on; on 8.9 the assembler makes it of two
    roundings, by way of float16. Triton's interpreter (3.6) gets it wrong: it rounds halves up,
    loses the carry into the exponent, misplaces subnormals and turns NaN into a finite number.
    """
    if device.type != "cuda" or torch.version.hip is not None or interpreting():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
