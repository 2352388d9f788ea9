"""The dynamic scale: from the tensor's own amax, for each dtype and every input layout."""

import math

import pytest
import torch

from float8.quantize.quantize import quantize
from float8.quantize.scale import SMALLEST_AMAX
from float8.quantize.spec import CastSpec
from sqnr import same_bits
from support.devices import DTYPES, E4M3, E5M2, FLOAT8_MAX, on_devices
from support.scales import dynamic_scale


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (64, 128), (5, 3, 17)])
def test_dynamic_scale_equals_a_float64_recomputation(
    device: str, dtype: torch.dtype, format: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape).mul(3).to(dtype)
    amax = max(abs(v) for v in x.double().flatten().tolist())
    expected = torch.tensor(amax / FLOAT8_MAX[format], dtype=torch.float64).float()
    assert same_bits(dynamic_scale(x.to(device), format, False), expected)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_dynamic_scale_of_zeros_casts_zeros_to_zeros(device: str, dtype: torch.dtype) -> None:
    x = torch.zeros(16, 32, dtype=dtype, device=device)
    scale = dynamic_scale(x, E4M3, False)
    assert scale.item() == torch.tensor(SMALLEST_AMAX / 448.0, dtype=torch.float64).float().item()
    assert quantize(x, CastSpec(E4M3), row=True, scale=scale).row.data.float().abs().max() == 0


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("round_to_power_of_2", [False, True])
def test_smallest_subnormal_survives_the_cast(
    device: str, dtype: torch.dtype, round_to_power_of_2: bool
) -> None:
    # float32's own smallest numbers lie under SMALLEST_AMAX and become 0; the others must not.
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # smallest subnormal
    x = torch.full((16, 16), max(tiny, SMALLEST_AMAX), dtype=dtype, device=device)
    scale = dynamic_scale(x, E4M3, round_to_power_of_2)
    assert math.isfinite(scale.item())
    assert math.isfinite((1.0 / scale).item())
    row = quantize(x, CastSpec(E4M3), row=True, scale=scale).row
    assert row.scale is scale
    back = row.data.double() * scale.double()
    assert bool((back - x.double()).abs().le(x.double() / 16).all())


@on_devices
def test_dynamic_scale_reads_every_layout(device: str) -> None:
    base = torch.randn(40, 48, device=device)
    base[3, 5] = -99.0
    for x in (base.t(), base[1:9, 2:7], base.unfold(0, 2, 3), base[:, ::3].t(), base[3, 5]):
        expected = torch.tensor(x.double().abs().max().item() / 448.0, dtype=torch.float64)
        assert same_bits(dynamic_scale(x, E4M3, False), expected.float())


@on_devices
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("round_to_power_of_2", [False, True])
def test_dynamic_scale_of_a_non_finite_tensor_is_non_finite(
    device: str, value: float, round_to_power_of_2: bool
) -> None:
    x = torch.randn(8, 8, device=device)
    x[2, 3] = value
    assert not math.isfinite(dynamic_scale(x, E4M3, round_to_power_of_2).item())


@on_devices
def test_dynamic_scale_carries_no_gradient(device: str) -> None:
    x = torch.randn(8, 8, device=device, requires_grad=True)
    assert not dynamic_scale(x, E4M3, False).requires_grad
