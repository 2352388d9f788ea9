"""An independent float8 cast: from the table of all 256 codes of a format, in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
SCALES = [1.0, 0.0123, 2.0**-140, 1e-30, 3e38, 0.0, float("inf"), float("nan"), -2.0]


def value_of_code(code: int, dtype: torch.dtype) -> float:
    """The number that a code means, from the definition of the format."""
    exponent_bits, mantissa_bits = (4, 3) if dtype == torch.float8_e4m3fn else (5, 2)
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & (2**mantissa_bits - 1)
    if dtype == torch.float8_e4m3fn and code & 0x7F == 0x7F:
        return float("nan")
    if dtype == torch.float8_e5m2 and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def values(dtype: torch.dtype) -> Tensor:
    """[256] float64: what every code means."""
    return torch.tensor([value_of_code(code, dtype) for code in range(256)], dtype=torch.float64)


def nearest_even(v: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 -> uint8 codes: nearest, ties to the even code, saturated, NaN to 0x7f."""
    table = values(dtype)[:128]
    table = table[table.isfinite()]
    magnitude = v.abs().contiguous().clamp(max=table[-1].item()).nan_to_num(0.0)
    above = torch.searchsorted(table, magnitude).clamp(1, len(table) - 1)
    below = above - 1
    middle = (table[above] + table[below]) / 2
    even = torch.where(above % 2 == 0, above, below)
    code = torch.where(magnitude > middle, above, torch.where(magnitude < middle, below, even))
    code = code + 128 * torch.signbit(v)
    return torch.where(v.isnan(), 0x7F, code).to(torch.uint8)


def expected_scale(amax: Tensor, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    """The float32 scale of an amax, given as float64."""
    scale = (amax.clamp(min=2.0**-100) / (448 if dtype == FORMATS[0] else 57344)).float()
    mantissa, exponent = torch.frexp(scale.double())  # mantissa in [0.5, 1)
    rounded = torch.ldexp(torch.where(mantissa == 0.5, 0.5, 1.0).double(), exponent).float()
    return torch.where(scale.isfinite(), rounded, scale) if power_of_2 else scale


def expected_exponent(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of a block of MXFP8, float32: cut to what 8 bits hold, Inf to the largest."""
    quotient = amax / (448 if dtype == FORMATS[0] else 57344)
    mantissa, exponent = torch.frexp(quotient)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    exponent = torch.where(quotient == 0, -127, torch.where(quotient.isinf(), 127, exponent))
    scale = torch.ldexp(torch.ones_like(quotient), exponent)
    return torch.where(quotient.isnan(), quotient, scale).float()


def expected_mx_codes(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cast to MXFP8 makes: zeros under 2**-127, the largest value of Inf."""
    inverse = torch.where(scale == 2.0**-127, 1.0, 1 / scale.double())
    return nearest_even((x.cpu().double() * inverse).float().double(), dtype)


def expected_codes(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """What a cast of ``x`` makes of each element, as uint8, on the CPU."""
    # Exact in float64 until the one rounding to float32 that the definition names.
    inverse = (1 / torch.as_tensor(scale, dtype=torch.float32).double()).float().double()
    v = (x.cpu().double() * inverse).float().double()
    v = torch.where(x.cpu().isfinite(), v, float("nan"))
    return nearest_even(v, dtype)


def every_16_bit_value(dtype: torch.dtype) -> Tensor:
    """[256, 256]: all bfloat16 or float16 numbers, NaN and Inf included."""
    return (
        torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, -1)
    )


def around_every_tie(dtype: torch.dtype) -> Tensor:
    """[n] float32: all codes, the middles between neighbours, and the floats next to each."""
    table = values(dtype)
    table = table[table.isfinite()].sort().values
    points = torch.cat([table, (table[1:] + table[:-1]) / 2, table[-1:] * 1.04]).float()
    up = torch.nextafter(points, torch.tensor(float("inf")))
    down = torch.nextafter(points, torch.tensor(float("-inf")))
    return torch.cat([points, up, down, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38])])


def same_bytes(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are absent, or equal in shape, dtype and every byte, and contiguous."""
    if a is None or b is None:
        return a is b
    as_bytes = (a.view(torch.uint8), b.view(torch.uint8))
    return a.dtype == b.dtype and a.is_contiguous() and b.is_contiguous() and torch.equal(*as_bytes)


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Bit for bit, in shape and in strides; scales that are NaN are alike."""
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        assert mine.stride() == theirs.stride() or mine.numel() == 0
        if mine.dtype == torch.float32:
            assert torch.equal(mine.cpu().nan_to_num(-1.0), theirs.cpu().nan_to_num(-1.0))
        else:
            assert same_bytes(mine.cpu(), theirs.cpu())


def awkward(shape: tuple[int, ...], source: torch.dtype) -> Tensor:
    """Random numbers over many magnitudes, among them NaN, Inf, both zeros and subnormals."""
    x = (torch.randn(shape) * torch.randn(shape).mul(5).exp()).to(source)
    tiny = torch.finfo(source).smallest_normal / 4
    special = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, tiny, -tiny]
    flat = x.view(-1)
    for i, value in enumerate(special if x.numel() > 100 else []):
        flat[i * 3 :: 41] = value
    return x


def special(source: torch.dtype) -> Tensor:
    """[40, 50]: rows and columns of zeros, of subnormals, of the largest value, with Inf, NaN."""
    info = torch.finfo(source)
    x = torch.randn(40, 50).to(source)
    x[3], x[:, 4] = 0.0, -0.0
    x[5], x[:, 6] = info.smallest_normal / 4, -info.smallest_normal / 8
    x[7, 8], x[9, 10], x[11, 12] = info.max, -info.max, float("inf")
    x[13, 14], x[15, 16], x[15, 17] = float("nan"), -float("inf"), float("nan")
    return x
