"""One scale per block of 128: the twin against float64, the kernel against the twin."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from float8 import kernels
from float8.config import ScalingGranularity
from float8.formats import ceil16
from float8.kernels.cast_blockwise import (
    cast_blockwise_reference,
    cast_blockwise_triton,
    casting,
    config_of,
)
from float8.kernels.tiles import tile_launch
from float8.quantize.spec import CastSpec, Part
from kernels.float8_codes import FORMATS, expected_codes, expected_scale
from kernels.slots import like
from kernels.test_cast import awkward
from kernels.test_cast_axiswise import (
    CPU_AND_GPU,
    LAYOUTS,
    assert_same,
    formats,
    high_precision,
    layouts,
    power_of_2,
    special,
)
from sqnr import sqnr
from tolerances import CAST_E4M3

E4M3 = FORMATS[0]
RUNS = CastSpec(E4M3, ScalingGranularity.BLOCK_1x128)
SQUARES = CastSpec(E4M3, ScalingGranularity.BLOCK_128x128)
SHAPES = [(1, 1), (17, 33), (130, 257), (129, 384), (4, 700), (256, 128)]
EMPTY = [(0, 5), (5, 0), (0, 0)]

square = pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
both_specs = pytest.mark.parametrize("spec", [RUNS, SQUARES], ids=["1x128", "128x128"])


def expected_part(x: Tensor, dtype: torch.dtype, square: bool, power_of_2: bool) -> list[Tensor]:
    """Data of x, padded to whole blocks, and scales as they lie in memory, block by block."""
    R, C = x.shape
    tall, wide = -(-R // 128), -(-C // 128)
    codes = torch.zeros(tall * 128 if square else ceil16(R), wide * 128, dtype=torch.uint8)
    of_nothing = expected_scale(torch.zeros((), dtype=torch.float64), dtype, power_of_2).item()
    runs = torch.full((wide, ceil16(R)), of_nothing)
    squares = torch.zeros(tall, -(-wide // 4) * 4)
    for j in range(wide):
        columns = slice(j * 128, min(j * 128 + 128, C))
        for i in range(tall):
            rows = slice(i * 128, min(i * 128 + 128, R))
            block = x[rows, columns].double().abs()
            amax = block.amax().view(1, 1) if square else block.amax(1, keepdim=True)
            scale = expected_scale(amax, dtype, power_of_2)
            codes[rows, columns] = expected_codes(x[rows, columns], scale, dtype)
            runs[j, rows], squares[i, j] = scale[:, 0], scale[0, 0]
    return [codes.view(dtype), squares if square else runs.t()]


def expected(x: Tensor, dtype: torch.dtype, square: bool, power_of_2: bool) -> list[Tensor]:
    """Row data and scales, column data and scales."""
    x = x.cpu()
    row = expected_part(x, dtype, square, power_of_2)
    return [*row, *expected_part(x.t(), dtype, square, power_of_2)]


class TestReference:
    @formats
    @high_precision
    @square
    @power_of_2
    @pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
    def test_shapes(
        self,
        shape: tuple[int, int],
        power_of_2: bool,
        square: bool,
        source: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        x = awkward(shape, source)
        for y in (x, x.t()):
            want = expected(y, dtype, square, power_of_2)
            for row, col in LAYOUTS:
                got = cast_blockwise_reference(y, dtype, square, row, col, power_of_2)
                assert_same(got, want[:2] * row + want[2:] * col)

    @formats
    @high_precision
    @square
    def test_special_values(self, square: bool, source: torch.dtype, dtype: torch.dtype) -> None:
        x = special(source).repeat(4, 4)
        x[:128, 128:] = 1.0
        got = cast_blockwise_reference(x, dtype, square, True, True, False)
        assert_same(got, expected(x, dtype, square, False))
        assert not got[0][:128, 128:].float().isnan().any()
        assert not got[2][128:, :128].float().isnan().any()


def test_a_hot_row_costs_its_own_blocks_only() -> None:
    x = torch.randn(512, 512)
    x[100] = 2.0**16
    cold = torch.arange(512) >= 128
    for spec in (RUNS, SQUARES):
        row, col = kernels.cast_blockwise(x, spec, row=True, col=True)
        for part, transposed in ((row, False), (col, True)):
            assert part is not None
            scale = part.scale.repeat_interleave(128, 1)
            if spec is SQUARES:
                scale = scale.repeat_interleave(128, 0)
            values = part.data.float() * scale
            values = values.t() if transposed else values
            assert sqnr(x[cold], values[cold]) >= CAST_E4M3
            crowded = sqnr(x[:100], values[:100])
            if spec is RUNS and not transposed:
                assert crowded >= CAST_E4M3
            else:  # cold rows come down to the subnormal numbers, which lie 2**-9 apart
                step = 2.0**-9 * 2.0**16 / 448
                theory = 10 * torch.log10(torch.tensor(12 / step**2)).item()
                assert abs(crowded - theory) < 1


class TestTriton:
    """On the GPU, or in a process of test_interpreter.py."""

    @high_precision
    @square
    @pytest.mark.parametrize("shape", [(1, 1), (17, 33), (130, 257), *EMPTY], ids=str)
    def test_shapes(
        self,
        shape: tuple[int, int],
        square: bool,
        source: torch.dtype,
        triton_device: torch.device,
    ) -> None:
        x = awkward(shape, source).to(triton_device)
        for y in (x, x.t()):
            args = (y, FORMATS[1], square, True, True, False)
            assert_same(cast_blockwise_triton(*args), cast_blockwise_reference(*args))

    @formats
    @high_precision
    @square
    @power_of_2
    def test_special_values(
        self,
        power_of_2: bool,
        square: bool,
        source: torch.dtype,
        dtype: torch.dtype,
        triton_device: torch.device,
    ) -> None:
        x = special(source).to(triton_device)
        for y in (x, x.t()):
            args = (y, dtype, square, True, True, power_of_2)
            assert_same(cast_blockwise_triton(*args), cast_blockwise_reference(*args))

    @square
    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x[:, ::2],
            lambda x: x[1:, 1:],
            lambda x: x.t()[1:, 2:],
            lambda x: x[0].expand(40, -1),
            lambda x: x[:, :1].expand(-1, 20),
            lambda x: x[:, 5:6],
            lambda x: x[5:6],
            lambda x: x.reshape(-1)[1 : 1 + 32 * 48].view(32, 48),  # off by two bytes
        ],
        ids=lambda _: "view",
    )
    def test_strides(
        self, view: Callable[[Tensor], Tensor], square: bool, triton_device: torch.device
    ) -> None:
        x = view(awkward((37, 50), torch.bfloat16).to(triton_device))
        args = (x, E4M3, square, True, True, False)
        assert_same(cast_blockwise_triton(*args), cast_blockwise_reference(*args))

    @square
    @layouts
    @pytest.mark.parametrize(
        "num_warps",
        [pytest.param(4, marks=pytest.mark.gpu), 8, pytest.param(16, marks=pytest.mark.gpu)],
    )
    @pytest.mark.parametrize(("shape", "group"), [((256, 128), 1), ((131, 145), 2)], ids=str)
    def test_launch_configurations(
        self,
        shape: tuple[int, int],
        group: int,
        num_warps: int,
        layouts: tuple[bool, bool],
        square: bool,
        triton_device: torch.device,
    ) -> None:
        config = tile_launch(*shape, 128, 128, num_warps, group)
        x = awkward(shape, torch.bfloat16).to(triton_device)
        program = casting(like(x), E4M3, square, *layouts, False, config)
        assert_same(program(x), cast_blockwise_reference(x, E4M3, square, *layouts, False))

    @pytest.mark.parametrize("wide", [1, 2, 4, 5])
    def test_scales_of_squares_are_padded(self, wide: int, triton_device: torch.device) -> None:
        x = torch.ones(130, 128 * wide, device=triton_device)
        for y in (x, x.t()):
            row, col = kernels.cast_blockwise(y, SQUARES, row=True, col=True)
            assert row is not None
            assert col is not None
            args = (y, E4M3, True, True, True, False)
            assert_same(cast_blockwise_triton(*args), [*row, *col])
            tall, wide_ = -(-y.shape[0] // 128), -(-y.shape[1] // 128)
            assert row.scale.shape == (tall, -(-wide_ // 4) * 4)
            assert not row.scale[:, wide_:].any()
            assert not col.scale[:, tall:].any()


def test_launch_configuration_is_pure() -> None:
    config = config_of(8192, 4096, columns_of_runs=True)
    assert config == config_of(8192, 4096, columns_of_runs=True)
    assert config.even
    assert config_of(8200, 4096, columns_of_runs=True).programs == 65 * 32


@pytest.mark.gpu
class TestGpu:
    @formats
    @high_precision
    @square
    @layouts
    @pytest.mark.parametrize(
        "shape",
        [(4096, 4096), (8200, 1048), (1000, 4097), (17, 33), (129, 384), (4, 5000)],
        ids=str,
    )
    def test_matches_reference(
        self,
        shape: tuple[int, int],
        layouts: tuple[bool, bool],
        square: bool,
        source: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        x = awkward(shape, source).cuda()
        for y in (x, x.t()):
            args = (y, dtype, square, *layouts, True)
            assert_same(cast_blockwise_triton(*args), cast_blockwise_reference(*args))

    def test_more_elements_than_31_bits_count(self) -> None:
        R, C = 70_016, 32_768
        x = torch.randn(R, C, dtype=torch.bfloat16, device="cuda")
        for square in (False, True):
            got = cast_blockwise_triton(x, E4M3, square, True, True, False)
            last = cast_blockwise_reference(x[-128:], E4M3, square, True, True, False)
            assert torch.equal(got[0][-128:].view(torch.uint8), last[0].view(torch.uint8))
            assert torch.equal(got[2][:, -128:].view(torch.uint8), last[2].view(torch.uint8))
            assert torch.equal(got[1][-1] if square else got[1][-128:], last[1].squeeze(0))


@pytest.mark.parametrize("device", CPU_AND_GPU)
@both_specs
class TestFunction:
    def test_order_and_absence(self, device: str, spec: CastSpec) -> None:
        x = torch.randn(20, 128, device=device, requires_grad=True)
        square = spec is SQUARES
        want = cast_blockwise_reference(x.detach(), E4M3, square, True, True, False)
        for cast in (kernels.cast_blockwise, kernels.cast_blockwise_traced):
            for of_row, of_col in LAYOUTS:
                row, col = cast(x * 1, spec, row=of_row, col=of_col)
                assert (row is not None, col is not None) == (of_row, of_col)
                got = [*(row or ()), *(col or ())]
                assert_same(got, want[:2] * of_row + want[2:] * of_col)
                assert not any(made.requires_grad for made in got)

    def test_wrong_input_says_what_to_do(self, device: str, spec: CastSpec) -> None:
        x = torch.randn(4, 4, device=device)
        for cast in (kernels.cast_blockwise, kernels.cast_blockwise_traced):
            with pytest.raises(ValueError, match=r"expected BLOCK_1x128 or BLOCK_128x128"):
                cast(x, CastSpec(E4M3), row=True, col=True)
            with pytest.raises(ValueError, match=r"row=False, col=False"):
                cast(x, spec, row=False, col=False)
            with pytest.raises(TypeError, match=r"torch\.float64 tensor"):
                cast(x.double(), spec, row=True, col=True)

    @pytest.mark.parametrize(
        ("backend", "C"),
        [
            ("aot_eager", 256),
            ("aot_eager", 160),
            pytest.param("inductor", 256, marks=pytest.mark.exhaustive),
            ("inductor", 160),
        ],
    )
    def test_one_graph_for_all_sizes(
        self, device: str, spec: CastSpec, C: int, backend: str
    ) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)

        @torch.compile(backend=counter, fullgraph=True, dynamic=True)
        def compiled(x: Tensor) -> tuple[Part | None, Part | None]:
            return kernels.cast_blockwise_traced(x * 2, spec, row=True, col=True)

        for rows in (200, 256, 384, 1000, 129):  # up to 128 are one block: compiled once more
            x = torch.randn(rows, C, device=device)
            want = kernels.cast_blockwise(x * 2, spec, row=True, col=True)
            for got, part in zip(compiled(x), want, strict=True):
                assert got is not None
                assert part is not None
                assert_same([*got], [*part])
        assert len([g for g in counter.graphs if g.graph.find_nodes(op="placeholder")]) == 1

    def test_a_compiler_sees_all_but_the_transposition(self, device: str, spec: CastSpec) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")

        @torch.compile(backend=counter, fullgraph=True)
        def compiled(x: Tensor) -> tuple[Part | None, Part | None]:
            return kernels.cast_blockwise_traced(x, spec, row=True, col=True)

        compiled(torch.randn(32, 256, device=device))
        ops = torch.ops.float8
        targets = [node.target for node in counter.graphs[0].graph.nodes]
        assert targets.count(ops.transpose.default) == 1
        assert ops.cast_blockwise.default not in targets
