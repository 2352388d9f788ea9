from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from float8.formats import ceil16
from float8.kernels import cast_kernel
from float8.kernels.cast import _cast_program, _cast_triton
from float8.kernels.cast import cast_reference as twin_of_cast
from float8.kernels.cast_kernel import casting, launch_config
from float8.kernels.runtime.launch import Program
from float8.kernels.tiles import tile_launch
from kernels.float8_codes import (
    FORMATS,
    HIGH_PRECISION,
    around_every_tie,
    every_16_bit_value,
    expected_codes,
    same_bytes,
)
from kernels.slots import like

SHAPES = [(1, 1), (17, 33), (1, 4096), (130, 7), (48, 160)]
EMPTY = [(0, 5), (5, 0), (0, 0)]
SCALES = [1.0, 0.0123, 2.0**-140, 1e-30, 3e38, 0.0, float("inf"), float("nan"), -2.0]

formats = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
high_precision = pytest.mark.parametrize("source", HIGH_PRECISION, ids=["f32", "bf16", "f16"])


def layouts_of(cast: Callable[..., list[Tensor]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """`cast`, which returns the layouts asked for, as a function that returns both or None."""

    def function(
        x: Tensor, scale: Tensor, dtype: torch.dtype, *, row: bool, col: bool, pad_rows=False
    ) -> tuple[Tensor | None, Tensor | None]:
        out = cast(x, scale, dtype, row, col, pad_rows)
        assert len(out) == row + col
        return out[0] if row else None, out[-1] if col else None

    return function


cast_reference, cast_triton = layouts_of(twin_of_cast), layouts_of(_cast_triton)


def awkward(shape: tuple[int, ...], source: torch.dtype) -> Tensor:
    """Random numbers over many magnitudes, among them NaN, Inf, both zeros and subnormals."""
    x = (torch.randn(shape) * torch.randn(shape).mul(5).exp()).to(source)
    tiny = torch.finfo(source).smallest_normal / 4
    special = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, tiny, -tiny]
    flat = x.view(-1)
    for i, value in enumerate(special if x.numel() > 100 else []):
        flat[i * 3 :: 41] = value
    return x


def assert_layouts(
    out: tuple[Tensor | None, Tensor | None], codes: Tensor, dtype: torch.dtype, pad_rows: bool
) -> None:
    """Both layouts hold ``codes`` [R, C] and zeros around them."""
    R, C = codes.shape
    row_data, col_data = out
    full = torch.zeros(ceil16(R), ceil16(C), dtype=torch.uint8)
    full[:R, :C] = codes
    if row_data is not None:
        want = full if pad_rows else full[:R]
        assert same_bytes(row_data.cpu(), want.contiguous().view(dtype))
    if col_data is not None:
        assert same_bytes(col_data.cpu(), full.t().contiguous().view(dtype))


class TestReference:
    @formats
    @pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
    @pytest.mark.parametrize("scale", SCALES)
    def test_every_16_bit_value(
        self, source: torch.dtype, dtype: torch.dtype, scale: float
    ) -> None:
        x = every_16_bit_value(source)
        row_data, _ = cast_reference(x, torch.tensor(scale), dtype, row=True, col=False)
        assert row_data is not None
        assert torch.equal(row_data.view(torch.uint8), expected_codes(x, scale, dtype))

    @formats
    @pytest.mark.parametrize("scale", [1.0, 2.0**-140, 2.0**100, 0.3])
    def test_ties(self, dtype: torch.dtype, scale: float) -> None:
        x = (around_every_tie(dtype).double() * scale).float()[None]
        row_data, _ = cast_reference(x, torch.tensor(scale), dtype, row=True, col=False)
        assert row_data is not None
        codes = row_data.view(torch.uint8)[:, : x.shape[1]]
        assert torch.equal(codes, expected_codes(x, scale, dtype))

    @formats
    @high_precision
    @pytest.mark.parametrize("shape", SHAPES + EMPTY)
    @pytest.mark.parametrize("pad_rows", [False, True])
    def test_layouts(
        self, shape: tuple[int, int], source: torch.dtype, dtype: torch.dtype, pad_rows: bool
    ) -> None:
        x = awkward(shape, source)
        scale = torch.tensor([0.25])
        out = cast_reference(x, scale, dtype, row=True, col=True, pad_rows=pad_rows)
        assert_layouts(out, expected_codes(x, 0.25, dtype), dtype, pad_rows)
        row_only = cast_reference(x, scale, dtype, row=True, col=False, pad_rows=pad_rows)
        col_only = cast_reference(x, scale, dtype, row=False, col=True, pad_rows=pad_rows)
        assert row_only[1] is None
        assert col_only[0] is None
        assert same_bytes(row_only[0], out[0])
        assert same_bytes(col_only[1], out[1])

    @formats
    def test_meaning_of_special_values(self, dtype: torch.dtype) -> None:
        limit = torch.finfo(dtype).max
        x = torch.tensor([[float("inf"), -float("inf"), float("nan"), 3e38, -3e38, -0.0, 1e-45]])
        row_data, _ = cast_reference(x, torch.tensor(0.5), dtype, row=True, col=False)
        assert row_data is not None
        got = row_data.float()[0, :7]
        assert got[:3].isnan().all()
        assert got[3:5].tolist() == [limit, -limit]
        assert got[5:].tolist() == [0.0, 0.0]
        assert got.signbit()[5:].tolist() == [True, False]
        for scale in (float("nan"), 0.0):  # 0 / scale is NaN
            row_data, _ = cast_reference(x, torch.tensor(scale), dtype, row=True, col=False)
            assert row_data is not None
            assert row_data.float()[0, [0, 1, 2, 5]].isnan().all()


class TestTriton:
    """On the GPU, or in a process of test_interpreter.py."""

    @pytest.fixture(params=[True, False], ids=["hardware", "integers"])
    def rounding(
        self,
        request: pytest.FixtureRequest,
        triton_device: torch.device,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[None]:
        """Convert by instruction, or by the arithmetic that other devices use."""
        if request.param and not cast_kernel.has_float8_conversion(triton_device):
            pytest.skip("this device has no float8 conversion that is right")
        monkeypatch.setattr(cast_kernel, "has_float8_conversion", lambda _: request.param)
        _cast_program.cache_clear()
        yield
        _cast_program.cache_clear()

    @formats
    @pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
    @pytest.mark.parametrize("scale", [1.0, 0.0123])
    @pytest.mark.usefixtures("rounding")
    def test_every_16_bit_value(
        self, source: torch.dtype, dtype: torch.dtype, scale: float, triton_device: torch.device
    ) -> None:
        x = every_16_bit_value(source).to(triton_device)
        s = torch.tensor(scale, device=triton_device)
        out = cast_triton(x, s, dtype, row=True, col=True)
        assert_layouts(out, expected_codes(x, scale, dtype), dtype, pad_rows=False)

    @formats
    @pytest.mark.parametrize("scale", [1.0, 2.0**-140])
    @pytest.mark.usefixtures("rounding")
    def test_ties(self, dtype: torch.dtype, scale: float, triton_device: torch.device) -> None:
        x = (around_every_tie(dtype).double() * scale).float()[None]
        s = torch.tensor(scale, device=triton_device)
        out = cast_triton(x.to(triton_device), s, dtype, row=True, col=True)
        assert_layouts(out, expected_codes(x, scale, dtype), dtype, pad_rows=False)

    @formats
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.usefixtures("rounding")
    def test_scales(self, dtype: torch.dtype, scale: float, triton_device: torch.device) -> None:
        x = awkward((17, 33), torch.float32).to(triton_device)
        s = torch.tensor(scale, device=triton_device)
        twin = cast_reference(x, s, dtype, row=True, col=True)
        out = cast_triton(x, s, dtype, row=True, col=True)
        assert same_bytes(out[0], twin[0])
        assert same_bytes(out[1], twin[1])

    @high_precision
    @pytest.mark.parametrize("shape", [(1, 1), (17, 33), (1, 300), (130, 7), *EMPTY])
    @pytest.mark.parametrize("pad_rows", [False, True])
    def test_shapes(
        self,
        shape: tuple[int, int],
        source: torch.dtype,
        pad_rows: bool,
        triton_device: torch.device,
    ) -> None:
        x = awkward(shape, source).to(triton_device)
        s = torch.tensor([0.7], device=triton_device)
        out = cast_triton(x, s, FORMATS[1], row=True, col=True, pad_rows=pad_rows)
        assert_layouts(out, expected_codes(x, 0.7, FORMATS[1]), FORMATS[1], pad_rows)

    @pytest.mark.parametrize("layouts", [(True, False), (False, True), (True, True)], ids=str)
    @pytest.mark.parametrize("pad_rows", [False, True])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_layouts(
        self,
        layouts: tuple[bool, bool],
        pad_rows: bool,
        transposed: bool,
        triton_device: torch.device,
    ) -> None:
        x = awkward((40, 70), torch.bfloat16).to(triton_device)
        x = x.t() if transposed else x
        s = torch.tensor(0.7, device=triton_device)
        row, col = layouts
        out = cast_triton(x, s, FORMATS[0], row=row, col=col, pad_rows=pad_rows)
        assert [data is not None for data in out] == [row, col]
        assert_layouts(out, expected_codes(x, 0.7, FORMATS[0]), FORMATS[0], pad_rows)

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x[:, ::2],
            lambda x: x[::3, ::2],
            lambda x: x[1:, 1:],
            lambda x: x.t()[1:, 2:],
            lambda x: x.t()[::2],
            lambda x: x[0].expand(40, -1),
            lambda x: x[:, :1].expand(-1, 20),
            lambda x: x[:1, :1].expand(33, 18),
            lambda x: x[:, 5:6],
            lambda x: x[5:6],
        ],
        ids=lambda _: "view",
    )
    def test_strides(self, view: Callable[[Tensor], Tensor], triton_device: torch.device) -> None:
        x = view(awkward((37, 50), torch.float32).to(triton_device))
        s = torch.tensor(3.0, device=triton_device)
        out = cast_triton(x, s, FORMATS[1], row=True, col=True)
        assert_layouts(out, expected_codes(x, 3.0, FORMATS[1]), FORMATS[1], pad_rows=False)

    @pytest.mark.parametrize(
        "tile", [(128, 128, 8), (64, 64, 4), (32, 64, 4), (32, 256, 4), (16, 128, 2), (16, 16, 1)]
    )
    @pytest.mark.parametrize(("even", "group"), [(True, 8), (False, 1), (False, 2)])
    def test_launch_configurations(
        self, tile: tuple[int, int, int], even: bool, group: int, triton_device: torch.device
    ) -> None:
        R, C = (3 * tile[0], 2 * tile[1]) if even else (2 * tile[0] + 3, tile[1] + 17)
        config = tile_launch(R, C, *tile, group=group)
        assert config.even == even
        s = torch.tensor(0.7, device=triton_device)
        x = awkward((R, C), torch.bfloat16).to(triton_device)
        if group == 2:
            x = x.t()  # read along its first dim
        given = [like(x), like(s)]
        made = casting(given[0], FORMATS[0], True, True, scale=given[1], config=config)
        out = Program(given, *made)(x, s)
        assert_layouts(out, expected_codes(x, 0.7, FORMATS[0]), FORMATS[0], pad_rows=False)


def test_launch_config_is_pure_and_covers() -> None:
    for across in (True, False):
        for R, C in ((1, 1), (16, 4096), (130, 7), (8192, 4096), (28672, 8192), (8200, 4096)):
            config = launch_config(R, C, across=across, sms=132)
            assert config == launch_config(R, C, across=across, sms=132)
            assert f"block_r={config.block_r}" in repr(config)
            tiles = -(-ceil16(R) // config.block_r) * -(-ceil16(C) // config.block_c)
            assert config.programs == tiles
            assert config.even == (R % config.block_r == 0 and C % config.block_c == 0)
    assert launch_config(8192, 4096, across=True, sms=132).block_r == 128


@pytest.mark.gpu
class TestGpu:
    @formats
    @high_precision
    @pytest.mark.parametrize("shape", [(4096, 4096), (8200, 1048), (1000, 4097), (16, 8192)])
    def test_matches_reference(
        self, shape: tuple[int, int], source: torch.dtype, dtype: torch.dtype
    ) -> None:
        x = awkward(shape, source).cuda()
        s = torch.tensor(0.0371, device="cuda")
        for y in (x, x.t()):
            twin = cast_reference(y, s, dtype, row=True, col=True, pad_rows=True)
            out = cast_triton(y, s, dtype, row=True, col=True, pad_rows=True)
            assert same_bytes(out[0], twin[0])
            assert same_bytes(out[1], twin[1])

    def test_more_elements_than_31_bits_count(self) -> None:
        R, C = 70_016, 32_768
        assert R * C > 2**31
        x = torch.randn(R, C, dtype=torch.bfloat16, device="cuda")
        s = torch.tensor(0.01, device="cuda")
        row_data, col_data = cast_triton(x, s, FORMATS[0], row=True, col=True)
        assert row_data is not None
        assert col_data is not None
        for first in range(0, R, 7168):
            part = slice(first, min(first + 7168, R))
            twin = cast_reference(x[part], s, FORMATS[0], row=True, col=True)
            assert same_bytes(row_data[part], twin[0])
            assert same_bytes(col_data[:, part].contiguous(), twin[1])
