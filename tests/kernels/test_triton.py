"""Every kernel whose results are exact against its plain-torch twin, bit for bit.

On the GPU, or in a process of test_interpreter.py. `test_twins.py` compares the twins with float64.
"""

import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from float8.config import ScalingGranularity
from float8.kernels.amax import amax_plan, is_dense
from float8.kernels.dequantize import dequantised_triton
from float8.kernels.runtime import ops
from float8.scales import Operand, dequantised
from kernels.float8_codes import (
    FORMATS,
    HIGH_PRECISION,
    SCALES,
    around_every_tie,
    assert_same,
    awkward,
    every_16_bit_value,
    same_bytes,
    special,
)
from kernels.interpreter import SLOW

E4M3, E5M2 = FORMATS
BF16, FP32 = torch.bfloat16, torch.float32
MAX_PARTS = 2048  # that each program of a kernel which joins them reads
CAST: Any = importlib.import_module("float8.kernels.cast")  # not the function of that name


class How(NamedTuple):
    """What a cast is asked for."""

    dtype: torch.dtype = E4M3
    row: bool = True
    col: bool = True
    pad_rows: bool = False
    power_of_2: bool = False


def one(x: Tensor, value: float) -> Tensor:
    return torch.tensor(value, device=x.device)


def delayed(ops: Any, x: Tensor, how: How, scale: float = 0.0) -> list[Tensor]:
    amax = one(x, 2.5)
    return [*ops.cast_delayed(x, one(x, scale), amax, *how, True), amax]


def cast(
    height: int | None = None, width: int | None = None, scale: float | None = None, via: Any = None
) -> Any:
    """Return a kernel of `KERNELS` that casts so."""
    given = lambda x: None if scale is None else one(x, scale)  # noqa: E731
    return lambda ops, x, how: ops.cast(x, given(x), height, width, *how, via)


KERNELS: dict[str, Callable[[Any, Tensor, How], list[Tensor]]] = {
    "amax": lambda ops, x, how: [ops.amax(x)],
    "given": cast(scale=0.7),
    "rounded": cast(scale=0.7, via=BF16),
    "measured": cast(),
    "unknown": delayed,
    "known": lambda ops, x, how: delayed(ops, x, how, 0.03),
    "rows": cast(1),
    "runs": cast(1, 128),
    "squares": cast(128, 128),
    "runs of 32": cast(1, 32),
    "squares of 32": cast(32, 32),
    "transpose": lambda ops, x, how: [ops.transpose(x)],
}
BLOCKS = [kernel for kernel in KERNELS if "runs" in kernel or "squares" in kernel]
CASTS = [name for name in KERNELS if name not in ("amax", "transpose")]

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_cast = pytest.mark.parametrize("kernel", CASTS)
formats = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
high_precision = pytest.mark.parametrize("source", HIGH_PRECISION, ids=["f32", "bf16", "f16"])


def given(kernel: str, x: Tensor, device: torch.device) -> Tensor:
    return (x.to(E4M3) if kernel == "transpose" else x).to(device)


def check(kernel: str, x: Tensor, how: How = How()) -> None:  # noqa: B008
    got, want = (KERNELS[kernel](each, x, how) for each in (ops.cuda, ops.cpu))
    assert_same(got, want)


@pytest.mark.parametrize(
    ("shape", "source"),
    [
        ((17, 33), FP32),
        *(pytest.param(shape, BF16, marks=SLOW) for shape in ((1, 1), (130, 150))),
        pytest.param((17, 33), torch.float16, marks=SLOW),
    ],
    ids=str,
)
@each_kernel
def test_shapes(
    kernel: str, shape: tuple[int, int], source: torch.dtype, triton_device: torch.device
) -> None:
    x = given(kernel, awkward(shape, source), triton_device)
    for y in (x, x.t()):
        check(kernel, y, How(E5M2, pad_rows=True))


@pytest.mark.parametrize("kernel", ["given", "rows", *BLOCKS])
def test_one_row_and_one_column(kernel: str, triton_device: torch.device) -> None:
    for shape in ((40, 1), (1, 40)):  # of one Triton knows when it compiles
        x = awkward(shape, BF16).to(triton_device)
        for row in (True, False):
            check(kernel, x, How(E4M3, row, not row))


@each_kernel
def test_nothing(kernel: str, triton_device: torch.device) -> None:
    for shape in ((0, 5), (5, 0), (0, 0)):
        check(kernel, given(kernel, torch.empty(shape), triton_device))


@each_cast
@pytest.mark.parametrize(
    "layouts",
    [(True, True), *(pytest.param((row, not row), marks=SLOW) for row in (True, False))],
    ids=str,
)
def test_layouts_of_special_values(
    kernel: str, layouts: tuple[bool, bool], triton_device: torch.device
) -> None:
    x, y = (special(source).to(triton_device) for source in (FP32, BF16))
    check(kernel, x, How(E4M3, *layouts, pad_rows=False, power_of_2=True))
    check(kernel, y.t(), How(E5M2, *layouts, pad_rows=True, power_of_2=False))


VIEWS: list[Callable[[Tensor], Tensor]] = [
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
    lambda x: x.reshape(-1)[1 : 1 + 32 * 48].view(32, 48),  # off by one element
]


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=[] if kernel in ("given", "transpose") else SLOW)
        for kernel in KERNELS
    ],
)
def test_strides(kernel: str, triton_device: torch.device) -> None:
    x = given(kernel, awkward((37, 50), BF16), triton_device)
    for view in VIEWS:
        check(kernel, view(x))


# Large tiles, middle ones, and small ones, as many multiprocessors want them; even and odd.
SIZES = [
    *[(1, (256, 128)), (1, (260, 257))],
    *[(1, (64, 128)), (1, (50, 70))],
    *[(1000, (64, 128)), (1000, (300, 70))],
]
TILED = [(kernel, *size) for kernel in ("given", "rows", "transpose") for size in SIZES]
TILED += [(kernel, *size) for kernel in BLOCKS for size in SIZES[:2]]
SHORT = [("rows", *SIZES[2]), ("runs", *SIZES[1])]
TILED_OR_SLOW = [pytest.param(*how, marks=[] if how in SHORT else SLOW) for how in TILED]


@pytest.mark.parametrize(("kernel", "sms", "size"), TILED_OR_SLOW)
def test_launch_configurations(
    kernel: str,
    sms: int,
    size: tuple[int, int],
    triton_device: torch.device,
    multiprocessors: Callable[[int], None],
) -> None:
    multiprocessors(sms)
    x = given(kernel, awkward(size, FP32), triton_device)
    for y in (x, x.t()) if size == (50, 70) else (x,):
        check(kernel, y)
    if kernel == "given":
        check(kernel, x, How(col=False))


def test_whole_rows_and_those_that_are_too_long_to_hold(
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    multiprocessors: Callable[[int], None],
) -> None:
    for shape in ((16, 16), (9, 1024), (3, 5000)):
        x = awkward(shape, BF16).to(triton_device)
        for pad_rows in (False, True):
            check("rows", x, How(col=False, pad_rows=pad_rows))
    monkeypatch.setattr(CAST, "WIDEST_ROW", 100)
    multiprocessors(4)
    x = awkward((70, 200), torch.float16).to(triton_device)
    check("rows", x, How(col=False))
    check("rows", x.t(), How(row=False))


class TestRounding:
    @pytest.fixture(autouse=True, params=[True, False], ids=["hardware", "integers"])
    def rounding(
        self,
        request: pytest.FixtureRequest,
        triton_device: torch.device,
        monkeypatch: pytest.MonkeyPatch,
        multiprocessors: Callable[[int], None],
    ) -> None:
        """Convert by instruction, or by the arithmetic that other devices use."""
        if request.param and not CAST.has_float8_conversion(triton_device):
            pytest.skip("this device has no float8 conversion that is right")
        monkeypatch.setattr(CAST, "has_float8_conversion", lambda _: request.param)
        multiprocessors(1)

    @pytest.mark.parametrize("dtype", [E4M3, pytest.param(E5M2, marks=SLOW)], ids=["e4m3", "e5m2"])
    def test_all_values(self, dtype: torch.dtype, triton_device: torch.device) -> None:
        ties = around_every_tie(dtype)
        ties = torch.nn.functional.pad(ties, (0, -len(ties) % 64)).view(64, -1)
        numbers = [(every_16_bit_value(source), 0.0123) for source in HIGH_PRECISION[1:]]
        numbers += [((ties.double() * s).float(), s) for s in (1.0, 2.0**-140)]
        numbers += [(awkward((17, 33), FP32), scale) for scale in SCALES]
        for x, scale in numbers:
            x = x.to(triton_device)
            args = (x, one(x, scale), None, None, dtype, True, True)
            assert_same(ops.cuda.cast(*args), ops.cpu.cast(*args))


def test_the_smallest_exponents(triton_device: torch.device) -> None:
    """Amaxes about 2**-127 * 448: those whose exponent is 0, and those that have none."""
    amaxes = torch.exp2(torch.arange(-124.0, -108.0)).unsqueeze(1) * torch.tensor([1.0, 1.75, 1.76])
    x = (amaxes.reshape(-1, 1) * torch.linspace(-1, 1, 32)).to(triton_device)
    args = (x, None, 1, 32, E4M3, True, False)
    assert_same(ops.cuda.cast(*args), ops.cpu.cast(*args))


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(of, marks=SLOW if of.width == 128 - 96 * of.square else [])
        for of in ScalingGranularity
    ],
    ids=lambda of: of.value,
)
def test_dequantised(of: ScalingGranularity, triton_device: torch.device) -> None:
    """All codes, also of rows that lie apart and of several matrices, as experts have."""
    for dtype, shape in itertools.product(FORMATS, ((40, 300), (3, 20, 70))):
        if len(shape) == 3 and of.one_scale:
            continue
        codes = torch.randint(0, 256, (*shape[:-1], shape[-1] + 4), dtype=torch.uint8)
        data = codes.to(triton_device).view(dtype)[..., 2:-2]
        scale = torch.exp2(torch.randint(-30, 30, of.scales(shape)).float())
        scale = scale.mT.contiguous().mT if scale.dim() else scale
        operand = Operand(data, scale.to(triton_device))
        for out in BF16, FP32:
            got, want = (f(operand, of, out) for f in (dequantised_triton, dequantised))
            assert got.dtype == out
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [E4M3, pytest.param(E5M2, marks=SLOW)], ids=["e4m3", "e5m2"])
def test_special_amaxes(dtype: torch.dtype, triton_device: torch.device) -> None:
    peaks = (0.0, 1e-45, 2.0**-101, 1 / 3, 447.0, 3.3e38, math.inf, math.nan)
    for peak, power_of_2 in itertools.product(peaks, (False, True)):
        x = torch.zeros(20, 30, device=triton_device)
        x[3, 4] = -peak
        check("measured", x, How(dtype, power_of_2=power_of_2))


@pytest.mark.parametrize(
    ("scale", "record"),
    [
        (0.0, True),
        pytest.param(0.03125, False, marks=SLOW),
        pytest.param(0.0, False, marks=SLOW),
        pytest.param(0.03125, True, marks=SLOW),
    ],
)
def test_delayed_scaling_records(scale: float, record: bool, triton_device: torch.device) -> None:
    known = torch.tensor(scale, device=triton_device)
    mine, theirs = (torch.tensor(2.5, device=triton_device) for _ in range(2))
    for factor in (0.1, 5.0, math.nan, 1.0):  # below and above what is recorded; a NaN stays
        x = (torch.rand(40, 33) * factor).to(BF16).to(triton_device)
        for y, layouts in ((x, (True, True)), (x.t(), (True, False)), (x[:, 1:], (False, True))):
            before, how = mine._version, (E4M3, *layouts, False, False, record)
            got = ops.cuda.cast_delayed(y, known, mine, *how)
            want = ops.cpu.cast_delayed(y, known, theirs, *how)
            assert_same([*got, mine], [*want, theirs])
            assert (mine._version > before) == record
        if factor == 5.0:
            assert (mine.item() > 2.5) == record
    assert mine.isnan().item() == record
    assert known.item() == scale


@pytest.mark.parametrize("parts", [1, 3, pytest.param(MAX_PARTS, marks=pytest.mark.gpu)])
def test_any_number_of_parts_is_joined(
    parts: int, triton_device: torch.device, multiprocessors: Callable[[int], None]
) -> None:
    multiprocessors(1000)
    for last in (False, True):
        x = torch.rand(32 * parts, 128, device=triton_device)
        x.view(-1)[-1 if last else 0] = 9.0
        check("measured", x)


@high_precision
@pytest.mark.parametrize("n", [8 * 4096, pytest.param(40 * 8192 + 5, marks=SLOW)])
def test_every_place_counts_for_an_amax(
    n: int, source: torch.dtype, triton_device: torch.device, multiprocessors: Callable[[int], None]
) -> None:
    multiprocessors(1)
    tiny, info = torch.finfo(source).smallest_normal / 4, torch.finfo(source)
    x = torch.full((n,), -0.0, dtype=source, device=triton_device)
    assert not ops.cuda.amax(x).signbit()
    for at, value in ((0, tiny), (n // 2, -info.max), (n - 1, -math.inf), (n - 2, math.nan)):
        x[at] = value
        check("amax", x)
        check("amax", x[1:])


def test_amax_of_any_dims(triton_device: torch.device) -> None:
    x = torch.randn(6, 10, 12, device=triton_device)
    views = (x, x.permute(2, 0, 1), x[1:], x[..., 1:], x[..., ::3], x.permute(2, 1, 0)[:, ::2])
    for y in (*views, x[:, :1].expand(-1, 9, -1), x[:1, :1, :1].expand(4, 5, 6), x[0, 0, 0], x[:0]):
        check("amax", y)


def test_nothing_is_read_where_the_scale_is_known(triton_device: torch.device) -> None:
    x = torch.ones(40, 50, device=triton_device)
    measure = amax_plan(x.numel(), x.dtype, x.device, True)
    for scale, wanted in ((0.5, 7.0), (0.0, 1.0)):
        parts = torch.full((measure.programs,), 7.0, device=triton_device)
        measure(x, parts, one(x, scale))
        assert bool((parts == wanted).all())


@pytest.mark.gpu
@high_precision
@pytest.mark.parametrize(
    "shape", [(4096, 4096), (8200, 1048), (1000, 4097), (4, 5000), (64, 40_000)], ids=str
)
@each_kernel
def test_large(
    kernel: str, shape: tuple[int, int], source: torch.dtype, triton_device: torch.device
) -> None:
    x = given(kernel, awkward(shape, source), triton_device)
    for y, (dtype, row, col) in itertools.product(
        (x, x.t()), ((E4M3, True, True), (E5M2, True, False), (E4M3, False, True))
    ):
        check(kernel, y, How(dtype, row, col, True, dtype == E5M2))


@pytest.mark.gpu
def test_more_elements_than_31_bits_count(triton_device: torch.device) -> None:
    R, C = 70_016, 32_768
    assert R * C > 2**31
    x = torch.randn(R, C, dtype=BF16, device=triton_device)
    x[-1, -1] = 100.0
    assert ops.cuda.amax(x).item() == ops.cuda.amax(x[:, 1:]).item() == 100.0
    for kernel in ("given", "rows", "runs", "squares"):
        got = KERNELS[kernel](ops.cuda, x, How())
        row, col = got[0], got[len(got) // 2]
        last_rows = KERNELS[kernel](ops.cpu, x[-128:], How(col=False))
        last_columns = KERNELS[kernel](ops.cpu, x[:, -128:], How(row=False))
        assert same_bytes(row[-128:], last_rows[0])
        assert same_bytes(col[-128:], last_columns[0])
        if len(got) == 4:
            for scale, last in ((got[1], last_rows[1]), (got[3], last_columns[1])):
                assert torch.equal(scale[-len(last) :], last)
        assert same_bytes(ops.cuda.transpose(row)[-128:], row[:, -128:].t().contiguous())
        del got, row, col


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    x = torch.randn(256, 512, dtype=BF16, device="cuda")
    known, amax = (torch.zeros((), device="cuda") for _ in range(2))

    def both() -> list[Tensor]:
        return [
            *KERNELS["measured"](ops.cuda, x, How()),
            *ops.cuda.cast_delayed(x, known, amax, *How(), True),
        ]

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for factor in (1.0, 3.0):
        x.mul_(factor)
        amax.zero_()
        graph.replay()
        assert_same(captured, both())
        assert amax.item() == x.abs().max().item()


def test_is_dense(triton_device: torch.device) -> None:
    x = torch.empty(4, 6, 8)
    for y in (x, x.permute(2, 0, 1), x[1:], x[:1], torch.empty(()), x.unsqueeze(1)):
        assert is_dense(y.shape, y.stride())
    for y in (x[:, :, :4], x[:, 1:], x[..., ::2], x[:1, :1].expand(4, 6, -1)):
        assert not is_dense(y.shape, y.stride())


def test_shares_cover_all_elements(
    triton_device: torch.device, multiprocessors: Callable[[int], None]
) -> None:
    multiprocessors(132)
    for n in (1, 7, 8192, 100_000, 33_554_432, 2**33 + 1):
        planned = amax_plan(n, BF16, triton_device)
        programs, (_, rounds, block, steps, _) = planned.programs, planned._rest
        assert programs * rounds * steps * block >= n > (programs - 1) * rounds * steps * block
        assert programs <= MAX_PARTS
