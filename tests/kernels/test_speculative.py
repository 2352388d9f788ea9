"""Casts with a scale that was guessed: where it saturates, that of the amax, bit for bit."""

import math

import pytest
import torch
from torch import Tensor

from float8.kernels import _tiles
from float8.kernels.cast import cast_reference
from float8.kernels.cast_delayed import cast_delayed_reference, cast_delayed_triton
from float8.kernels.rms_norm import rms_norm_cast_reference, rms_norm_cast_triton
from float8.kernels.swiglu import swiglu_cast_reference, swiglu_cast_triton
from float8.kernels.swiglu_backward import (
    swiglu_backward_cast_reference,
    swiglu_backward_cast_triton,
)
from float8.scaling import amax_to_scale
from kernels.float8_codes import FORMATS, HIGH_PRECISION, same_bytes

E4M3, E5M2 = FORMATS
FLAGS = [(True, True, True), (True, False, False), (False, True, False)]
SHAPE = (20, 30)  # small: the interpreter is slow

functions = pytest.mark.parametrize(
    "function", [cast_delayed_triton, cast_delayed_reference], ids=["triton", "twin"]
)
formats = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        if mine.dtype == torch.float32:
            assert torch.equal(mine.cpu().nan_to_num(-1.0), theirs.cpu().nan_to_num(-1.0))
        else:
            assert same_bytes(mine.cpu(), theirs.cpu())


def scalars(device: torch.device, *values: float) -> list[Tensor]:
    return [torch.tensor(value, device=device) for value in values]


def own_scale(x: Tensor, dtype: torch.dtype, power_of_2: bool = False) -> Tensor:
    return amax_to_scale(x.float().abs().max(), dtype, power_of_2)


@functions
def test_a_guess_that_holds_is_delayed_scaling(function, triton_device: torch.device) -> None:
    """Also one that the amax just reaches, as that of a weight that did not change."""
    x = torch.randn(SHAPE).bfloat16().to(triton_device)
    for margin, flags in zip((1.0, 1.5, 1000.0), FLAGS, strict=True):
        guess = own_scale(x, E4M3) * margin
        mine, theirs = scalars(triton_device, 0.5, 0.5)
        got = function(x, guess, mine, E4M3, *flags, False, True, True)
        assert_same(got, function(x, guess, theirs, E4M3, *flags, False, True, False))
        assert torch.equal(got[0], guess)
        assert torch.equal(mine, theirs)


@formats
@functions
@pytest.mark.parametrize(("power_of_2", "record"), [(False, True), (True, False)])
def test_a_guess_that_saturates_gives_way(
    record: bool, power_of_2: bool, function, dtype: torch.dtype, triton_device: torch.device
) -> None:
    """Also one that is too small by its last bit, and one that nobody knows yet."""
    x = torch.randn(SHAPE).bfloat16().to(triton_device)
    right = own_scale(x, dtype, power_of_2)
    below = torch.nextafter(right, torch.zeros_like(right))
    guesses = (below, right / 100, torch.zeros_like(right))
    for guess, (row, col, pad) in zip(guesses, FLAGS, strict=True):
        (amax,) = scalars(triton_device, 0.5)
        got = function(x, guess, amax, dtype, row, col, pad, power_of_2, record, True)
        data = cast_reference(x, right, dtype, row=row, col=col, pad_rows=pad)
        assert_same(got, [right, *(part for part in data if part is not None)])
        assert amax.item() == (x.abs().max().item() if record else 0.5)


@functions
def test_what_was_recorded_before_does_not_decide(function, triton_device: torch.device) -> None:
    """Casts are the same in whatever order they come, and when they are computed again."""
    x = torch.randn(SHAPE, device=triton_device)
    guess = own_scale(x, E4M3) * 2
    for recorded in (0.0, 1e6, math.nan):
        (amax,) = scalars(triton_device, recorded)
        used, _ = function(x, guess, amax, E4M3, True, False, False, False, True, True)
        assert torch.equal(used, guess)


@pytest.mark.parametrize("source", HIGH_PRECISION, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("guess", [0.004, 1.0])
def test_kernel_and_twin(guess: float, source: torch.dtype, triton_device: torch.device) -> None:
    x = (torch.randn(17, 33) * 7).to(source).to(triton_device)
    for y, flags in ((x, FLAGS[0]), (x.t(), FLAGS[1]), (x[:, 1:], FLAGS[2])):
        known, mine, theirs = scalars(triton_device, guess, 0.0, 0.0)
        before = mine._version
        got = cast_delayed_triton(y, known, mine, E4M3, *flags, False, True, True)
        want = cast_delayed_reference(y, known, theirs, E4M3, *flags, False, True, True)
        assert_same([*got, mine], [*want, theirs])
        assert torch.equal(known, scalars(triton_device, guess)[0])
        assert mine._version > before


@functions
@pytest.mark.parametrize("bad", [-math.inf, math.nan])
@pytest.mark.parametrize("guess", [0.0, 0.5])
def test_what_is_not_finite_shows(
    guess: float, bad: float, function, triton_device: torch.device
) -> None:
    """As with dynamic scaling, and in no cast but this one."""
    x = torch.ones(SHAPE, device=triton_device)
    clean = x.clone()
    x[7, 9] = bad
    known, amax = scalars(triton_device, guess, 0.0)
    options = (E4M3, True, True, False, False, True, True)
    used, row, col = function(x, known, amax, *options)
    assert not used.isfinite()
    assert row.float()[7, 9].isnan()
    assert col.float()[9, 7].isnan()
    assert not amax.isfinite()
    used, row, _ = function(clean, known, amax, *options)
    assert used.isfinite()
    assert row.float().isfinite().all()
    assert not amax.isfinite()


@functions
def test_zeros(function, triton_device: torch.device) -> None:
    x = torch.zeros(SHAPE, device=triton_device)
    for guess, expected in ((0.5, 0.5), (0.0, own_scale(x, E4M3).item())):
        known, amax = scalars(triton_device, guess, 0.0)
        used, row = function(x, known, amax, E4M3, True, False, False, False, True, True)
        assert used.item() == expected
        assert not row.float().any()
        assert amax.item() == 0.0


# ---------------------------------------------------------------- fused


def swiglu(triton: bool, x, guess: Tensor | None, amax: Tensor | None, **options):
    function = swiglu_cast_triton if triton else swiglu_cast_reference
    return function(x, x + 1, E4M3, guess, amax, False, **options)


def rms_norm(triton: bool, x, guess: Tensor | None, amax: Tensor | None, **options):
    function = rms_norm_cast_triton if triton else rms_norm_cast_reference
    weight = torch.linspace(0.5, 2.0, x.shape[1], device=x.device)
    return function(x, weight, 1e-5, E4M3, guess, amax, False, **options)[1:]


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "twin"])
@pytest.mark.parametrize("producer", [swiglu, rms_norm])
@pytest.mark.parametrize("shape", [SHAPE], ids=str)
def test_fused_producers(shape, producer, triton: bool, triton_device: torch.device) -> None:
    x = torch.randn(shape, device=triton_device)
    right, _ = producer(triton, x, None, None, record=False)  # dynamic: in a kernel of its own
    for record, factor in ((True, 0.02), (False, 0.0), (True, 1.5), (False, 3.0)):
        guess = right * factor
        mine, theirs = scalars(triton_device, 0.0, 0.0)
        got = producer(triton, x, guess, mine, record=record, speculative=True)
        torch.testing.assert_close(got[0], torch.maximum(guess, right), rtol=1e-6, atol=0)
        if factor > 1:
            assert torch.equal(got[0], guess)
        elif record:
            assert torch.equal(got[0], amax_to_scale(mine, E4M3, False))
        assert_same(got, producer(triton, x, got[0], theirs, record=record))  # delayed
        assert torch.equal(mine, theirs)
        assert bool(mine > 0) == record


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "twin"])
@pytest.mark.parametrize("shape", [SHAPE], ids=str)
def test_swiglu_backward(shape, triton: bool, triton_device: torch.device) -> None:
    """Each of the two gradients gives way by itself, and the product stays."""
    function = swiglu_backward_cast_triton if triton else swiglu_backward_cast_reference
    product_scale = torch.tensor(0.02, device=triton_device)
    inputs = [torch.randn(shape, device=triton_device) for _ in range(3)]
    args = (*inputs, product_scale, E4M3, E5M2)
    _, *right = function(*args, None, None, None, None, False, False)  # dynamic
    right = torch.stack((right[0], right[2]))
    for record, factors in zip(
        (True, True, True, False), ((2.0, 2.0), (0.01, 2.0), (2.0, 0.0), (0.01, 0.01)), strict=True
    ):
        guesses = right * torch.tensor(factors, device=triton_device)
        mine, theirs = (scalars(triton_device, 0.0, 0.0) for _ in range(2))
        states = (guesses[0], mine[0], guesses[1], mine[1])
        got = function(*args, *states, False, record, True)
        used = torch.stack((got[1], got[3]))
        torch.testing.assert_close(used, torch.maximum(guesses, right), rtol=1e-6, atol=0)
        for i, factor in enumerate(factors):
            if factor > 1:
                assert torch.equal(used[i], guesses[i])
            elif record:
                assert torch.equal(used[i], amax_to_scale(mine[i], E5M2, False))
        states = (used[0], theirs[0], used[1], theirs[1])
        assert_same(got, function(*args, *states, False, record))  # delayed
        assert mine == theirs
        assert all(bool(amax > 0) == record for amax in mine)


def test_programs_that_repair_several_tiles(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "REPAIR_PROGRAMS", 1)
    x = torch.randn(16, 300, device=triton_device)  # of no other test: plans of launches are kept
    right = own_scale(x, E4M3)
    small = scalars(triton_device, 1e-9, 0.0)
    got = cast_delayed_triton(x, *small, E4M3, True, True, False, False, False, True)
    assert_same(got, [right, *cast_reference(x, right, E4M3, row=True, col=True)])
    args = (x, x + 1, x - 1, torch.ones_like(right), E4M3, E5M2)
    got = swiglu_backward_cast_triton(*args, *small, *small, False, True, True)
    states = (got[1], torch.zeros_like(right), got[3], torch.zeros_like(right))
    assert got[1] > small[0]
    assert_same(got, swiglu_backward_cast_triton(*args, *states, False, False))


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("shape", [(8192, 4096), (4096, 14336), (1000, 4097)], ids=str)
def test_large_on_the_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    for guess in (0.0, 1e-6, 1e-3, 10.0):
        for y in (x, x.t()):
            for flags in FLAGS:
                known, mine, theirs = scalars(x.device, guess, 0.0, 0.0)
                got = cast_delayed_triton(y, known, mine, dtype, *flags, False, True, True)
                want = cast_delayed_reference(y, known, theirs, dtype, *flags, False, True, True)
                assert_same([*got, mine], [*want, theirs])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (512, 14336), (1000, 1050)], ids=str)
def test_large_and_fused_on_the_gpu(shape: tuple[int, int]) -> None:
    device = torch.device("cuda")
    for producer in (swiglu, rms_norm):
        test_fused_producers(shape, producer, True, device)
    test_swiglu_backward(shape, True, device)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    """One graph casts once or twice, as the data want it."""
    x = torch.randn(1024, 512, dtype=torch.bfloat16, device="cuda")
    known, amax = own_scale(x, E4M3), torch.zeros((), device="cuda")

    def cast() -> list[Tensor]:
        return cast_delayed_triton(x, known, amax, E4M3, True, True, False, False, True, True)

    cast()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cast()
    for factor in (1.0, 3.0, 1 / 3):
        x.mul_(factor)
        amax.zero_()
        graph.replay()
        assert_same(captured, cast())
        assert torch.equal(captured[0], torch.maximum(known, own_scale(x, E4M3)))
        assert amax.item() == x.abs().max().item()
