"""The plain-torch twins of casts and amax against independent ones in float64, bit for bit."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from float8 import kernels
from float8.config import CastConfig, ScalingGranularity
from float8.formats import ceil16
from float8.kernels import amax
from float8.kernels.runtime import ops
from float8.kernels.transpose import BYTE_DTYPES
from kernels.float8_codes import (
    FORMATS,
    HIGH_PRECISION,
    SCALES,
    around_every_tie,
    assert_same,
    awkward,
    every_16_bit_value,
    expected_codes,
    expected_exponent,
    expected_mx_codes,
    expected_scale,
    same_bytes,
    special,
)

E4M3 = FORMATS[0]
SHAPES = [(1, 1), (17, 33), (130, 257), (4, 700), (0, 5), (5, 0), (0, 0)]
LAYOUTS = [(True, True), (True, False), (False, True)]
FINER = [of for of in ScalingGranularity if not of.one_scale]

formats = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
high_precision = pytest.mark.parametrize("source", HIGH_PRECISION, ids=["f32", "bf16", "f16"])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


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


def expected_part(
    x: Tensor, of: ScalingGranularity, dtype: torch.dtype, pad_rows: bool, power_of_2: bool
) -> list[Tensor]:
    """Data of x [R, C], padded, and scales as they lie in memory."""
    R, C = x.shape
    tall, wide, multiple = (of.height, of.width, of.width) if of.width else (1, C or 1, 16)
    columns = C + -C % wide or (0 if of.width else 1)
    blocks = torch.zeros(R + -R % tall, columns, dtype=torch.float64)
    blocks[:R, :C] = x.double().abs()
    of_blocks = blocks.view(len(blocks) // tall, tall, columns // wide, wide).amax((1, 3))
    exponents = of.value in ("block_1x32", "block_32x32")
    scale_of = expected_exponent if exponents else partial(expected_scale, power_of_2=power_of_2)
    codes_of = expected_mx_codes if exponents else expected_codes
    scales = scale_of(of_blocks, dtype)
    each = scales.repeat_interleave(tall, 0).repeat_interleave(wide, 1)[:R, :C]
    rows = R + -R % (of.width if of.square else 16) if pad_rows else R
    data = torch.zeros(rows, C + -C % multiple, dtype=torch.uint8)
    data[:R, :C] = codes_of(x, each, dtype)
    if of.square:
        return [data.view(dtype), torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))]
    of_nothing = scale_of(torch.zeros((), dtype=torch.float64), dtype).item()
    scales = torch.nn.functional.pad(scales, (0, 0, 0, rows - R), value=of_nothing)
    if of.width:
        scales = scales.t().clone(memory_format=torch.contiguous_format).t()
    return [data.view(dtype), scales]


@pytest.mark.parametrize("of", FINER, ids=lambda of: of.value)
@pytest.mark.parametrize(
    ("source", "dtype", "power_of_2"),
    [
        (torch.float32, FORMATS[1], False),
        (torch.bfloat16, E4M3, True),
        (torch.float16, E4M3, False),
    ],
    ids=str,
)
def test_finer_casts(
    source: torch.dtype, dtype: torch.dtype, power_of_2: bool, of: ScalingGranularity
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
