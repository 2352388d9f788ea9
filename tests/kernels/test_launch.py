"""Launching compiled kernels: which of them PyTorch's launcher takes, and how it is called."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from float8 import kernels
from float8.kernels.runtime import launch
from float8.kernels.runtime.launch import _binary
from kernels.float8_codes import same_bytes


def compiled(signature: dict[str, str], **metadata: Any) -> Any:
    usual = {"num_warps": 8, "shared": 64, "global_scratch_size": 0, "profile_scratch_size": 0}
    return SimpleNamespace(
        metadata=SimpleNamespace(**usual | metadata),
        src=SimpleNamespace(signature=signature),
        function=1234,
    )


SIGNATURE = {"x": "*bf16", "y": "constexpr", "n": "i32", "one": "constexpr", "big": "i64"}


def test_parameters_that_the_kernel_has() -> None:
    binary = _binary(compiled(SIGNATURE))
    assert binary is not None
    assert binary[:-1] == (1234, 8, 64, "OilOO", (None, None))


@pytest.mark.parametrize(
    "unusual",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"global_scratch_size": 16},
        {"profile_scratch_size": 16},
    ],
    ids=str,
)
def test_unusual_kernels_are_left_to_triton(unusual: dict[str, Any]) -> None:
    assert _binary(compiled(SIGNATURE, **unusual)) is None


def test_unknown_types_are_left_to_triton() -> None:
    assert _binary(compiled(SIGNATURE | {"f": "fp32"})) is None


def cast(x: torch.Tensor) -> list[torch.Tensor]:
    row, col = kernels.cast(
        x, torch.full((), 0.01, device=x.device), torch.float8_e4m3fn, row=True, col=True
    )
    assert row is not None
    assert col is not None
    return [row, col]


@pytest.mark.gpu
def test_kernels_are_launched_by_pytorch_after_the_first_call() -> None:
    """Else eager mode is slower than it could be, and nobody notices."""
    if not launch._CACHED:
        pytest.skip("FLOAT8_PLAIN_LAUNCH=1")
    cast(torch.randn(96, 160, device="cuda"))
    assert launch._binaries
    assert None not in launch._binaries.values()


@pytest.mark.gpu
def test_inputs_that_start_anywhere() -> None:
    base = torch.randn(96 * 160 + 8, device="cuda")
    for offset in (0, 1, 2, 4, 0):
        x = base[offset : offset + 96 * 160].view(96, 160)
        for got, want in zip(cast(x), cast(x.cpu()), strict=True):
            assert same_bytes(got.cpu(), want)


@pytest.mark.gpu
def test_a_thread_whose_first_work_on_the_gpu_it_is() -> None:
    x = torch.randn(96, 160, device="cuda")
    want = cast(x)
    got: list[torch.Tensor] = []
    scale = torch.full((), 0.01, device="cuda")

    def work() -> None:
        row, col = kernels.cast(x, scale, torch.float8_e4m3fn, row=True, col=True)
        assert row is not None
        assert col is not None
        got.extend([row, col])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for a, b in zip(got, want, strict=True):
        assert same_bytes(a, b)
