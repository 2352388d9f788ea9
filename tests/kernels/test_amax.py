"""The twin of amax against float64; test_triton.py has the kernel."""

import math

import pytest
import torch

from float8.kernels import amax
from kernels.float8_codes import HIGH_PRECISION

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("source", HIGH_PRECISION, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    "shape", [(), (1, 1), (17, 33), (1, 4096), (3, 5, 7), (0,), (0, 5)], ids=str
)
def test_amax(shape: tuple[int, ...], source: torch.dtype) -> None:
    x = torch.randn(shape).to(source)
    for peaks in ((), (NAN,), (INF,), (-INF,), (INF, NAN, -INF), (-9.0, 8.0)):
        for i, peak in enumerate(peaks if x.numel() > 100 else ()):
            x.view(-1)[x.numel() * 3 // 4 + i] = peak
        got, magnitudes = amax(x), x.double().abs().flatten()
        expected = torch.cat([magnitudes, torch.zeros(1, dtype=torch.float64)]).max().item()
        assert (got.shape, got.dtype, got.device) == ((), torch.float32, x.device)
        assert got.item() == expected or (math.isnan(got.item()) and math.isnan(expected))


def test_wrong_input_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"torch\.int64 tensor of shape \(2,\).* a float32"):
        amax(torch.ones(2, dtype=torch.int64))
