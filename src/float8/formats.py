"""The float8 formats, the alignment of GEMMs, and which devices run them."""

import functools

import torch

E4M3 = torch.float8_e4m3fn
"""4 exponent bits, 3 mantissa bits: for inputs, weights, and gradients under finer scaling."""

E5M2 = torch.float8_e5m2
"""5 exponent bits, 2 mantissa bits: for gradients under per-tensor scaling."""

FLOAT8_MAX: dict[torch.dtype, float] = {E4M3: 448.0, E5M2: 57344.0}
"""The largest finite value of each supported format."""

SHORT_NAME: dict[torch.dtype, str] = {E4M3: "e4m3", E5M2: "e5m2"}

HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be cast to float8 and that a float8 GEMM can return."""

GEMM_ALIGNMENT = 16
"""Feature and contraction dims are padded to multiples of 16: GEMMs read 16 bytes at a time."""


def ceil16(n: int) -> int:
    """Return `n` rounded up to a multiple of 16, without a guard if `n` is a `SymInt`."""
    return (n + (GEMM_ALIGNMENT - 1)) // GEMM_ALIGNMENT * GEMM_ALIGNMENT


GROUP_ALIGNMENT = 128
"""Tokens of each expert are padded to multiples of 128 for GEMMs that contract over tokens."""

HOPPER, BLACKWELL = (9,), (10, 12)
"""Major compute capabilities of GPUs with GEMMs under scales of 128-element blocks (`HOPPER`), and
under 8-bit exponents (`BLACKWELL`). Only the first of each has grouped GEMMs."""


@functools.cache
def lacks_float8_gemm(device: torch.device, *, only: tuple[int, ...] = ()) -> str | None:
    """Return the reason why `device` cannot run float8 GEMMs, or None if it can.

    CPU and meta devices can. An NVIDIA GPU needs compute capability 8.9 or higher or, if `only` is
    not empty, a major version in `only`, as block scales and MXFP8 require. No other device can.
    """
    if device.type in ("cpu", "meta"):
        return None
    if device.type != "cuda":
        return f"float8 GEMMs run on 'cuda' and 'cpu' devices, got '{device.type}'"
    if torch.version.hip is not None:
        return "AMD GPUs are not supported: casts and GEMMs are NVIDIA's formats and layouts"
    major, minor = torch.cuda.get_device_capability(device)
    if major in only or ((major, minor) >= (8, 9) and not only):
        return None
    name, expected = torch.cuda.get_device_name(device), ">= 8.9"
    if only:
        features = "block scales and experts" if only == HOPPER else "8-bit exponents as scales"
        expected = f"{' or '.join(f'{x}.x' for x in only)} for {features}"
    return f"{name} has compute capability {major}.{minor}, expected {expected}"
