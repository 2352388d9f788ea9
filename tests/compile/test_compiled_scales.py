"""Scales computed in compiled code: the bits of eager mode."""

import torch

from float8.quantize.quantize import Cast, scale_of
from float8.quantize.scale import amax_to_scale
from float8.quantize.spec import CastSpec
from sqnr import same_bits
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded

KINDS = [(format, to_power_of_2) for format in (E4M3, E5M2) for to_power_of_2 in (False, True)]


@on_devices
def test_dynamic_scales_under_inductor(device: str) -> None:
    def scales(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        casts = [Cast(CastSpec(format, power_of_2=rounded)) for format, rounded in KINDS]
        return [scale_of(x, cast) for x in inputs for cast in casts]

    compiled = torch.compile(scales, fullgraph=True)
    for seed, factor in enumerate((1.0, 1e-3, 300.0)):
        inputs = [seeded(seed, 65, 33, device=device).mul(factor).to(dtype) for dtype in DTYPES]
        for wanted, got in zip(scales(inputs), compiled(inputs), strict=True):
            assert same_bits(got, wanted)


@on_devices
def test_special_amaxes_under_inductor(device: str) -> None:
    def scales(amax: torch.Tensor) -> list[torch.Tensor]:
        return [amax_to_scale(amax, *kind) for kind in KINDS]

    special = [0.0, 1e-45, 2.0**-101, 2.0**-100, 1 / 3, 448.0, 57344.0, 3.4e38]
    amax = torch.tensor([*special, torch.inf, torch.nan], device=device)
    random = torch.exp(20 * seeded(0, 10_000, device=device)).clamp(max=3e38)
    amax = torch.cat([amax, random])
    for wanted, got in zip(scales(amax), torch.compile(scales, fullgraph=True)(amax), strict=True):
        assert same_bits(got.nan_to_num(-1.0), wanted.nan_to_num(-1.0))
