"""Scales and their reciprocals in kernels, for every mantissa that there is."""

import pytest
import torch

from float8.formats import E4M3, FLOAT8_MAX
from float8.kernels.numeric import reciprocal, scale_of_amax
from float8.kernels.runtime.triton import jit, tl

MANTISSAS = 1 << 23


@jit
def _kernel(amax_ptr, scale_ptr, inverse_ptr, MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    scale = scale_of_amax(tl.load(amax_ptr + at), (MANTISSA, POWER_OF_2, True))
    tl.store(scale_ptr + at, scale)
    tl.store(inverse_ptr + at, reciprocal(scale, True))


# The smallest amax that counts, sums of products that are subnormal, some of training, the largest.
@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [-100, -97, -60, -1, 0, 8, 15, 90, 126, 127])
@pytest.mark.parametrize("dtype", FLOAT8_MAX)
def test_scales_are_those_of_float64(exponent: int, dtype: torch.dtype) -> None:
    bits = torch.arange(MANTISSAS, dtype=torch.int32, device="cuda") | (exponent + 127 << 23)
    exact = (bits.view(torch.float32).double() / FLOAT8_MAX[dtype]).float()
    scale, inverse = torch.empty_like(exact), torch.empty_like(exact)
    for power_of_2 in (False, True):
        _kernel[(MANTISSAS // 1024,)](bits, scale, inverse, 3 if dtype == E4M3 else 2, power_of_2)
        if power_of_2:
            fraction, exponents = torch.frexp(exact)  # of 0.5 up to 1
            exact = torch.ldexp(torch.ones_like(exact), exponents - (fraction == 0.5).int())
        assert torch.equal(scale, exact)
        assert torch.equal(inverse, (1 / exact.double()).float())


@pytest.mark.gpu
def test_what_is_not_finite_or_tiny() -> None:
    inf, nan = float("inf"), float("nan")
    amax = torch.tensor([inf, nan, 0.0, 2.0**-149, 2.0**-101, 2.0**-100], device="cuda").repeat(512)
    amax = amax[:1024].contiguous()
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    _kernel[(1,)](amax.view(torch.int32), scale, inverse, 3, False)
    tiny = torch.tensor(2.0**-100 / 448, dtype=torch.float64).float().item()
    assert (scale[0].item(), inverse[0].item()) == (inf, 0.0)
    assert torch.stack([scale[1], inverse[1]]).isnan().all()
    assert scale[2:6].tolist() == [tiny] * 4
    assert inverse[2:6].tolist() == [torch.tensor(1 / tiny).item()] * 4
