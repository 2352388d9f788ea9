"""The plain-torch twins of casts and amax against independent ones in float64, bit for bit."""

import math

import pytest
import torch
from torch import Tensor

from float8 import kernels
from float8.config import CastConfig, ScalingGranularity
from float8.formats import ceil16
from float8.kernels import amax
from float8.kernels.runtime import ops
from float8.kernels.transpose import BYTE_DTYPES
from float8.scales import Operand, dequantised
from kernels.float8_codes import (
    FORMATS,
    HIGH_PRECISION,
    SCALES,
    around_every_tie,
    assert_same,
    awkward,
    every_16_bit_value,
    expected_codes,
    expected_scale,
    same_bytes,
    special,
)
from sqnr import sqnr
from tolerances import CAST_E4M3

E4M3 = FORMATS[0]
SHAPES = [(1, 1), (17, 33), (130, 257), (4, 700), (0, 5), (5, 0), (0, 0)]
LAYOUTS = [(True, True), (True, False), (False, True)]
RUNS, SQUARES = ScalingGranularity.BLOCK_1x128, ScalingGranularity.BLOCK_128x128
FINER = [ScalingGranularity.AXISWISE, RUNS, SQUARES]

formats = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
high_precision = pytest.mark.parametrize("source", HIGH_PRECISION, ids=["f32", "bf16", "f16"])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
finer = pytest.mark.parametrize("of", FINER, ids=["rows", "runs", "squares"])


def row_codes(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    (row,) = ops.cpu.cast(x, torch.tensor(scale), None, None, dtype, True, False)
    return row.view(torch.uint8)[:, : x.shape[1]]


@formats
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("scale", SCALES)
def test_every_16_bit_value(source: torch.dtype, dtype: torch.dtype, scale: float) -> None:
    x = every_16_bit_value(source)
    assert torch.equal(row_codes(x, scale, dtype), expected_codes(x, scale, dtype))


@formats
@pytest.mark.parametrize("scale", [1.0, 2.0**-140, 2.0**100, 0.3])
def test_ties(dtype: torch.dtype, scale: float) -> None:
    x = (around_every_tie(dtype).double() * scale).float()[None]
    assert torch.equal(row_codes(x, scale, dtype), expected_codes(x, scale, dtype))


@formats
def test_meaning_of_special_values(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    x = torch.tensor([[float("inf"), -float("inf"), float("nan"), 3e38, -3e38, -0.0, 1e-45]])
    got = row_codes(x, 0.5, dtype).view(dtype).float()[0]
    assert got[:3].isnan().all()
    assert got[3:].tolist() == [limit, -limit, 0.0, 0.0]
    assert got.signbit()[5:].tolist() == [True, False]
    for scale in (float("nan"), 0.0):  # 0 / scale is NaN
        assert row_codes(x, scale, dtype).view(dtype).float()[0, [0, 1, 2, 5]].isnan().all()


@high_precision
@shapes
@pytest.mark.parametrize("pad_rows", [False, True])
def test_layouts_under_one_scale(
    shape: tuple[int, int], source: torch.dtype, pad_rows: bool
) -> None:
    (R, C), x = shape, awkward(shape, source)
    full = torch.zeros(ceil16(R), ceil16(C), dtype=torch.uint8)
    full[:R, :C] = expected_codes(x, 0.25, E4M3)
    want = [full if pad_rows else full[:R], full.t().contiguous()]
    want = [codes.view(E4M3) for codes in want]
    for row, col in LAYOUTS:
        got = ops.cpu.cast(x, torch.tensor([0.25]), None, None, E4M3, row, col, pad_rows)
        assert_same(got, want[:1] * row + want[1:] * col)


@pytest.mark.parametrize("dtype", BYTE_DTYPES, ids=str)
@shapes
def test_transposed_bytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    whole = torch.randint(0, 256, shape, dtype=torch.uint8)
    for codes in (whole, whole.t(), whole[::2, 1:], whole[:1].expand(9 * len(whole[:1]), -1)):
        R, C = codes.shape
        want = torch.zeros(ceil16(C), ceil16(R), dtype=torch.uint8)
        want[:C, :R] = codes.t()
        out = kernels.transpose_bytes(codes.view(dtype))
        assert same_bytes(out, want.view(dtype))
        assert codes.numel() == 0 or out.data_ptr() != codes.data_ptr()


def ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def expected_part(
    x: Tensor, of: ScalingGranularity, dtype: torch.dtype, pad_rows: bool, power_of_2: bool
) -> list[Tensor]:
    """Data of x [R, C], padded, and scales as they lie in memory."""
    R, C = x.shape
    tall, wide, multiple = {RUNS: (1, 128, 128), SQUARES: (128, 128, 128)}.get(of, (1, C or 1, 16))
    columns = ceil_to(C, wide) or wide % 128
    blocks = torch.zeros(ceil_to(R, tall), columns, dtype=torch.float64)
    blocks[:R, :C] = x.double().abs()
    of_blocks = blocks.view(len(blocks) // tall, tall, columns // wide, wide).amax((1, 3))
    scales = expected_scale(of_blocks, dtype, power_of_2)
    each = scales.repeat_interleave(tall, 0).repeat_interleave(wide, 1)[:R, :C]
    rows = ceil_to(R, 128 if of is SQUARES else 16) if pad_rows else R
    data = torch.zeros(rows, ceil_to(C, multiple), dtype=torch.uint8)
    data[:R, :C] = expected_codes(x, each, dtype)
    if of is SQUARES:
        return [data.view(dtype), torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))]
    of_nothing = expected_scale(torch.zeros((), dtype=torch.float64), dtype, power_of_2).item()
    scales = torch.nn.functional.pad(scales, (0, 0, 0, rows - R), value=of_nothing)
    if of is RUNS:
        scales = scales.t().clone(memory_format=torch.contiguous_format).t()
    return [data.view(dtype), scales]


@formats
@finer
@pytest.mark.parametrize(
    ("source", "power_of_2"),
    [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
def test_finer_casts(
    power_of_2: bool, of: ScalingGranularity, source: torch.dtype, dtype: torch.dtype
) -> None:
    spec = CastConfig(target_dtype=dtype, scaling_granularity=of, power_of_2=power_of_2)
    pad_rows = of is not FINER[0] or power_of_2  # blocks are padded always
    for x in (special(source).repeat(4, 4), *(awkward(shape, source) for shape in SHAPES)):
        for y in (x, x.t()):
            want = expected_part(y, of, dtype, pad_rows, power_of_2)
            want += expected_part(y.t(), of, dtype, True, power_of_2)
            for row, col in LAYOUTS:
                parts = kernels.cast(y, spec, row=row, col=col, pad_rows=pad_rows)
                assert [part is not None for part in parts] == [row, col]
                got = [tensor for part in parts for tensor in part or ()]
                assert_same(got, want[:2] * row + want[2:] * col)


def both_layouts(x: Tensor, of: ScalingGranularity) -> tuple[Operand, Operand]:
    how = CastConfig(target_dtype=E4M3, scaling_granularity=of)
    row, col = kernels.cast(x, how, row=True, col=True)
    assert row is not None
    assert col is not None
    return row, col


@high_precision
@finer
def test_what_is_not_finite_spoils_what_shares_its_scale(
    of: ScalingGranularity, source: torch.dtype
) -> None:
    x = special(source).repeat(4, 4)
    x[:128, 128:] = 1.0
    bad = ~x.isfinite()
    row, col = both_layouts(x, of)
    if of is ScalingGranularity.AXISWISE:
        assert torch.equal(~row.scale[:, 0].isfinite(), bad.any(1))
        assert torch.equal(~col.scale[: x.shape[1], 0].isfinite(), bad.any(0))
    else:
        assert not row.data[:128, 128:].float().isnan().any()
        assert not col.data[128:, :128].float().isnan().any()


def test_a_hot_row_costs_what_shares_its_scale() -> None:
    x = torch.randn(512, 512)
    x[100] = 2.0**16
    # Where cold numbers share a scale with it, they come down to the subnormal ones, which lie
    # 2**-9 apart.
    theory = 10 * torch.log10(torch.tensor(12 / (2.0**-9 * 2.0**16 / 448) ** 2)).item()
    assert theory < CAST_E4M3 - 5
    row, _ = both_layouts(x, ScalingGranularity.TENSORWISE)
    assert abs(sqnr(x[101:], row.data.float()[101:] * row.scale) - theory) < 1
    for of in FINER:
        for part, transposed in zip(both_layouts(x, of), (False, True), strict=True):
            values = dequantised(part, of)
            values = values.t() if transposed else values
            # All columns cross the hot row: that is what blocks are for.
            spared = of is not FINER[0] or not transposed
            far, near = sqnr(x[128:], values[128:]), sqnr(x[:100], values[:100])
            assert far >= CAST_E4M3 if spared else abs(far - theory) < 1
            spared = of is not SQUARES and not transposed
            assert near >= CAST_E4M3 if spared else abs(near - theory) < 1


NAN, INF = math.nan, math.inf


@high_precision
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
