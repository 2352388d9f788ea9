import math

import pytest
import torch
from torch import Tensor

from float8.kernels import amax
from float8.kernels.amax import (
    MAX_PARTS,
    _amax_kernel,
    amax_reference,
    amax_triton,
    even_shares,
    is_dense,
    measuring,
)
from float8.kernels.runtime.launch import Launch, Slot
from kernels.float8_codes import HIGH_PRECISION
from kernels.slots import like

high_precision = pytest.mark.parametrize("source", HIGH_PRECISION, ids=["f32", "bf16", "f16"])
SHAPES = [(), (1, 1), (17, 33), (1, 4096), (130, 7), (3, 5, 7), (0,), (0, 5)]
VIEWS = {
    "whole": lambda x: x,
    "permuted": lambda x: x.permute(2, 0, 1),
    "sliced outside": lambda x: x[1:],
    "sliced inside": lambda x: x[..., 1:],
    "sliced everywhere": lambda x: x[1:, 1:, 1:],
    "every third": lambda x: x[..., ::3],
    "reversed dims, every second": lambda x: x.permute(2, 1, 0)[:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 9, -1),
    "expanded from one": lambda x: x[:1, :1, :1].expand(4, 5, 6),
}


def assert_amax(got: Tensor, x: Tensor) -> None:
    """Against float64, on the CPU."""
    assert got.shape == ()
    assert got.dtype == torch.float32
    assert got.device == x.device
    magnitudes = x.cpu().double().abs().flatten()
    expected = torch.cat([magnitudes, torch.zeros(1, dtype=torch.float64)]).max().item()
    assert got.item() == expected or (math.isnan(got.item()) and math.isnan(expected))


def with_peaks(x: Tensor, *peaks: float) -> Tensor:
    """``x`` with the peaks somewhere near its end."""
    for i, peak in enumerate(peaks):
        x.view(-1)[x.numel() * 3 // 4 + i] = peak
    return x


@high_precision
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference(shape: tuple[int, ...], source: torch.dtype) -> None:
    x = torch.randn(shape).to(source)
    assert_amax(amax_reference(x), x)
    assert_amax(amax(x), x)


@high_precision
@pytest.mark.parametrize(
    "peaks",
    [
        (float("nan"),),
        (float("inf"),),
        (-float("inf"),),
        (float("inf"), float("nan"), -float("inf")),
        (-9.0, 8.0),
    ],
    ids=str,
)
def test_reference_special_values(peaks: tuple[float, ...], source: torch.dtype) -> None:
    x = with_peaks(torch.randn(40, 50).to(source), *peaks)
    assert_amax(amax_reference(x), x)


def test_wrong_input_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"torch\.int64 tensor of shape \(2,\).* a float32"):
        amax(torch.ones(2, dtype=torch.int64))


def test_is_dense() -> None:
    x = torch.empty(4, 6, 8)
    for y in (x, x.permute(2, 0, 1), x[1:], x[:1], torch.empty(()), x.unsqueeze(1)):
        assert is_dense(y.shape, y.stride())
    for y in (x[:, :, :4], x[:, 1:], x[..., ::2], x[:1, :1].expand(4, 6, -1)):
        assert not is_dense(y.shape, y.stride())


def test_shares_cover_all_elements() -> None:
    for n in (1, 7, 8192, 100_000, 33_554_432, 2**33 + 1):
        block, steps, rounds, programs = even_shares(n, 8192, 132, steps=2, programs_per_sm=8)
        assert programs * rounds * steps * block >= n > (programs - 1) * rounds * steps * block
        assert programs <= MAX_PARTS
    assert even_shares(8192 * 4096, 8192, 132)[1] > 1
    assert even_shares(100, 8192, 132) == (8192, 1, 1, 1)


class TestTriton:
    """On the GPU, or in a process of test_interpreter.py."""

    @high_precision
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_shapes(
        self, shape: tuple[int, ...], source: torch.dtype, triton_device: torch.device
    ) -> None:
        x = torch.randn(shape).to(source).to(triton_device)
        assert_amax(amax_triton(x), x)

    @pytest.mark.parametrize("view", VIEWS)
    def test_strides(self, view: str, triton_device: torch.device) -> None:
        x = VIEWS[view](torch.randn(6, 10, 12, device=triton_device))
        assert_amax(amax_triton(x), x)

    @high_precision
    @pytest.mark.parametrize("largest", [False, True], ids=["small", "zeros to largest"])
    def test_every_place_counts(
        self, largest: bool, source: torch.dtype, triton_device: torch.device
    ) -> None:
        info = torch.finfo(source)
        for i in (0, 1000, 1023):
            x = torch.full((1024,), -0.0, dtype=source)
            x[i] = -info.max if largest else -info.smallest_normal / 4
            x = x.to(triton_device)
            assert_amax(amax_triton(x), x)
        x = torch.full((1024,), -0.0, dtype=source, device=triton_device)
        assert not amax_triton(x).signbit()

    @high_precision
    @pytest.mark.parametrize(
        "peaks",
        [(float("nan"),), (-float("inf"),), (float("inf"), float("nan"), -float("inf"))],
        ids=str,
    )
    @pytest.mark.parametrize("flat", [True, False])
    def test_special_values(
        self,
        peaks: tuple[float, ...],
        flat: bool,
        source: torch.dtype,
        triton_device: torch.device,
    ) -> None:
        x = with_peaks(torch.randn(40, 50).to(source), *peaks).to(triton_device)
        x = x if flat else x[:, 1:]
        assert_amax(amax_triton(x), x)

    @high_precision
    @pytest.mark.parametrize(("steps", "rounds"), [(1, 1), (1, 3), (2, 2), (8, 1)])
    @pytest.mark.parametrize("n", [2048, 2049, 3000])
    def test_launch_configurations(
        self, steps: int, rounds: int, n: int, source: torch.dtype, triton_device: torch.device
    ) -> None:
        programs = -(-n // (128 * steps * rounds))
        launch = Launch(_amax_kernel, programs, (), (n, rounds), (128, steps, False), 4)
        for at in (0, n // 2, n - 1):
            x = torch.rand(n).to(source).to(triton_device)
            x[at] = -2.0
            parts = torch.full((programs,), 99.0, device=triton_device)  # all are written
            launch.plainly([x, parts, None])
            assert_amax(parts.amax(), x)

    def test_nothing_is_read_where_the_scale_is_known(self, triton_device: torch.device) -> None:
        x = torch.ones(40, 50, device=triton_device)
        _, launch = measuring(like(x), Slot(torch.float32))
        for scale, wanted in ((0.5, 7.0), (0.0, 1.0)):
            parts = torch.full((launch.programs,), 7.0, device=triton_device)
            launch.plainly([x, parts, torch.tensor(scale, device=triton_device)])
            assert bool((parts == wanted).all())


@pytest.mark.gpu
@high_precision
@pytest.mark.parametrize("n", [8192 * 4096, 8192 * 4096 + 7, 12345])
def test_gpu_matches_reference(n: int, source: torch.dtype) -> None:
    x = torch.randn(n, device="cuda", dtype=source)
    assert torch.equal(amax_triton(x), amax_reference(x))
    assert torch.equal(amax_triton(x[1:]), amax_reference(x[1:]))
    for at in (0, n // 3, n - 1):
        y = x.clone()
        y[at] = float("nan")
        assert amax_triton(y).isnan()
        y[at] = -float("inf")
        assert amax_triton(y).item() == float("inf")


@pytest.mark.gpu
def test_more_elements_than_31_bits_count() -> None:
    x = torch.ones(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    x[-1] = -3.0
    assert amax_triton(x).item() == 3.0
    y = x.view(-1, 2**20)[:, 1:]
    assert amax_triton(y).item() == 3.0
