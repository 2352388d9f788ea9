"""Casts that choose their scale: the kernels against their twins, bit for bit."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from float8.kernels.amax import MAX_PARTS
from float8.kernels.cast import (
    _cast_delayed_triton,
    _cast_dynamic_triton,
    cast_delayed_reference,
    cast_dynamic_reference,
)
from float8.kernels.cast_kernel import casting
from float8.kernels.runtime.launch import Program, Slot
from float8.kernels.tiles import tile_launch
from float8.quantize.scale import amax_to_scale
from kernels.float8_codes import FORMATS, HIGH_PRECISION, same_bytes
from kernels.slots import like

FLAGS = [(True, True, True), (True, False, False), (False, True, False)]
SHAPES = [(1, 1), (17, 33), (64, 48)]

formats = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
high_precision = pytest.mark.parametrize("source", HIGH_PRECISION, ids=["f32", "bf16", "f16"])
power_of_2 = pytest.mark.parametrize("power_of_2", [False, True])


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert torch.equal(got[0].cpu().nan_to_num(-1.0), want[0].cpu().nan_to_num(-1.0))
    assert len(got) == len(want)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert same_bytes(mine.cpu(), theirs.cpu())


@formats
@high_precision
@power_of_2
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dynamic(
    shape: tuple[int, int],
    power_of_2: bool,
    source: torch.dtype,
    dtype: torch.dtype,
    triton_device: torch.device,
) -> None:
    x = (torch.randn(shape) * 7).to(source).to(triton_device)
    for y in (x, x.t()):
        for flags in FLAGS:
            got = _cast_dynamic_triton(y, dtype, *flags, power_of_2)
            assert_same(got, cast_dynamic_reference(y, dtype, *flags, power_of_2))


@formats
@power_of_2
@pytest.mark.parametrize("amax", [0.0, 1e-45, 2.0**-101, 1 / 3, 447.0, 3.3e38, math.inf, math.nan])
def test_dynamic_scale_of_special_amaxes(
    amax: float, power_of_2: bool, dtype: torch.dtype, triton_device: torch.device
) -> None:
    x = torch.zeros(20, 30, device=triton_device)
    x[3, 4] = -amax
    got = _cast_dynamic_triton(x, dtype, True, True, False, power_of_2)
    assert_same(got, cast_dynamic_reference(x, dtype, True, True, False, power_of_2))


@formats
@high_precision
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("scale", [0.0, 0.03125, 2.0])
def test_delayed(
    scale: float,
    record: bool,
    source: torch.dtype,
    dtype: torch.dtype,
    triton_device: torch.device,
) -> None:
    known = torch.tensor(scale, device=triton_device)
    mine, theirs = (torch.tensor(2.5, device=triton_device) for _ in range(2))
    for seed, factor in enumerate((0.1, 5.0, 1.0)):  # below, above, and below the recorded amax
        torch.manual_seed(seed)
        x = (torch.randn(40, 33) * factor).to(source).to(triton_device)
        for y, flags in ((x, FLAGS[0]), (x.t(), FLAGS[1]), (x[:, 1:], FLAGS[2])):
            before = mine._version
            got = _cast_delayed_triton(y, known, mine, dtype, *flags, False, record)
            want = cast_delayed_reference(y, known, theirs, dtype, *flags, False, record)
            assert_same(got, want)
            assert mine.item() == theirs.item()
            assert (mine._version > before) == record
    assert (mine.item() > 2.5) == record
    assert known.item() == scale


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_delayed_keeps_what_is_not_finite(
    scale: float, bad: float, triton_device: torch.device
) -> None:
    known = torch.tensor(scale, device=triton_device)
    mine, theirs = (torch.zeros((), device=triton_device) for _ in range(2))
    x = torch.ones(40, 50, device=triton_device)
    x[7, 9] = bad
    for y in (x, torch.ones_like(x)):
        got = _cast_delayed_triton(y, known, mine, FORMATS[0], True, True, False, False, True)
        want = cast_delayed_reference(y, known, theirs, FORMATS[0], True, True, False, False, True)
        assert_same(got, want)
        assert not math.isfinite(mine.item())
    assert torch.equal(mine.nan_to_num(-1.0), theirs.nan_to_num(-1.0))


@pytest.mark.parametrize("parts", [1, 3, 64, MAX_PARTS])
@pytest.mark.parametrize("history", [False, True])
def test_any_number_of_parts_is_joined(
    history: bool, parts: int, triton_device: torch.device
) -> None:
    x = torch.randn(40, 50, device=triton_device)
    amaxes = torch.rand(parts, device=triton_device)
    unknown = torch.zeros((), device=triton_device)
    for last in (False, True):
        amaxes[-1 if last else 0] = 9.0
        given = [like(x), Slot(torch.float32, (parts,))]
        given += [Slot(torch.float32)] * history
        names = dict(zip(("parts", "scale"), given[1:], strict=False))
        config = tile_launch(40, 50, 32, 32, 1)
        made = casting(given[0], FORMATS[0], True, True, config=config, **names)
        used, *_ = Program(given, *made)(x, amaxes, *[unknown] * history)
        assert torch.equal(used, amax_to_scale(amaxes.max(), FORMATS[0], False))


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("shape", [(8192, 4096), (4096, 14336), (1000, 4097)], ids=str)
def test_gpu_matches_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    flags = (True, True, False, False)
    assert_same(_cast_dynamic_triton(x, dtype, *flags), cast_dynamic_reference(x, dtype, *flags))
    for scale in (0.0, 0.01):
        known = torch.tensor(scale, device="cuda")
        mine, theirs = (torch.zeros((), device="cuda") for _ in range(2))
        assert_same(
            _cast_delayed_triton(x, known, mine, dtype, *flags, True),
            cast_delayed_reference(x, known, theirs, dtype, *flags, True),
        )
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    x = torch.randn(256, 512, dtype=torch.bfloat16, device="cuda")
    known, amax = (torch.zeros((), device="cuda") for _ in range(2))

    def both() -> list[Tensor]:
        options = (FORMATS[0], True, True, False, False)
        return [
            *_cast_dynamic_triton(x, *options),
            *_cast_delayed_triton(x, known, amax, *options, True),
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
        fresh = both()
        for part in (slice(0, 3), slice(3, 6)):
            assert_same(captured[part], fresh[part])
        assert amax.item() == x.abs().max().item()
