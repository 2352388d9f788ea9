"""The float8 formats, their largest values, GEMM alignment and the abilities of devices."""

import functools

import torch

E4M3 = torch.float8_e4m3fn
"""4 exponent bits, 3 mantissa bits, largest value 448: inputs and weights."""

E5M2 = torch.float8_e5m2
"""5 exponent bits, 2 mantissa bits, largest value 57344: gradients under per-tensor scaling."""

FLOAT8_MAX: dict[torch.dtype, float] = {E4M3: 448.0, E5M2: 57344.0}
"""Largest finite value of each supported format."""

SHORT_NAME: dict[torch.dtype, str] = {E4M3: "e4m3", E5M2: "e5m2"}

HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be cast to float8 and that a float8 GEMM can return."""

GEMM_ALIGNMENT = 16
"""Float8 GEMMs read 16 bytes at a time: feature and contraction dims are padded to this."""


def ceil16(n: int) -> int:
    """Return the smallest multiple of 16 that is not below `n`; a symbolic `n` gets no guard."""
    return (n + (GEMM_ALIGNMENT - 1)) // GEMM_ALIGNMENT * GEMM_ALIGNMENT


GROUP_ALIGNMENT = 128
"""Where groups are contracted, grouped GEMMs read this much of one at a time."""


HOPPER, BLACKWELL = (9,), (10, 12)
"""Major compute capabilities: of GPUs that multiply blocks of 128, and 8-bit exponents. Only the
first of them multiply groups."""


@functools.cache
def lacks_float8_gemm(device: torch.device, *, only: tuple[int, ...] = ()) -> str | None:
    """Say why `device` cannot run float8 GEMMs, or return None when it can.

    CUDA GPUs need compute capability 8.9 (Ada, Hopper and newer), or a major one of `only`.
    """
    if device.type in ("cpu", "meta"):
        return None
    if device.type == "cuda" and torch.version.hip is not None:
        return "AMD GPUs are not supported: casts and GEMMs are NVIDIA's formats and layouts"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major in only or ((major, minor) >= (8, 9) and not only):
            return None
        name, expected = torch.cuda.get_device_name(device), ">= 8.9"
        if only:
            what = "block scales and experts" if only == HOPPER else "8-bit exponents as scales"
            expected = f"{' or '.join(f'{x}.x' for x in only)} for {what}"
        return f"{name} has compute capability {major}.{minor}, expected {expected}"
    return f"float8 GEMMs run on 'cuda' and 'cpu' devices, got '{device.type}'"
