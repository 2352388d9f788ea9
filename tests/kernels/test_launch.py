"""Launching compiled kernels: which of them PyTorch's launcher takes, and how it is called."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from float8.kernels.runtime import launch, private
from float8.kernels.runtime.launch import _launch_arguments
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
    kernel = compiled(SIGNATURE)
    about, rest, owner = _launch_arguments(kernel, 5, (48, 1 << 40))
    assert about == (1234, 5, 1, 1, 8, 64, "OilOO")
    assert rest == (48, 1 << 40, None, None)
    assert owner is kernel  # whose function is unloaded with it


def test_unusual_and_unknown_kernels_are_left_to_triton() -> None:
    for name in ("launch_cooperative_grid", "launch_pdl"):
        assert _launch_arguments(compiled(SIGNATURE, **{name: True}), 5, ()) is None
    for name in ("num_ctas", "global_scratch_size", "profile_scratch_size"):
        assert _launch_arguments(compiled(SIGNATURE, **{name: 16}), 5, ()) is None
    without = compiled(SIGNATURE)
    del without.metadata.shared
    for kernel in (without, None, compiled(SIGNATURE | {"f": "fp32"})):
        assert _launch_arguments(kernel, 5, ()) is None


class _Memory:
    """A tensor on GPU 0, as far as a launch looks at it."""

    dtype = torch.bfloat16

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Kernel:
    """A Triton kernel that says what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*args: Any, num_warps: int, enable_fp_fusion: bool) -> Any:
            assert enable_fp_fusion  # said, because Triton 3.9 warns where it is not
            self.calls.append((grid, args, num_warps))
            return compiled({"x": "*bf16", "y": "*fp32", "n": "i32", "one": "constexpr"})

        return run


def test_what_is_handed_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensors that are None, no integers that are 1, no constants; and the scratch memory."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "_BYPASSES_TRITON", True)
    monkeypatch.setattr(private, "current_stream", lambda index: 77 + index)
    monkeypatch.setattr(private, "launch_kernel", lambda *args: calls.append(args))
    kernel = _Kernel()
    planned = launch.Launch(kernel, torch.device("cuda", 1), 5, (48, 1), ("constant",), 8)
    x, off, y = _Memory(4096), _Memory(4098), _Memory(8192)
    for first in (off, x, x, off, x):
        planned(first, None, y)
    launched = (1234, 5, 1, 1, 8, 64, "OOiOO", (4096, 8192, 48, None, None), 78)
    assert calls == [launched, launched]
    by_triton = [(a, None, y, 48, 1, "constant") for a in (off, x, off)]
    assert kernel.calls == [((5,), arguments, 8) for arguments in by_triton]


def test_triton_launches_where_pytorch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = _Kernel(), _Memory(4096)
    for launches, device in ((True, torch.device("cpu")), (False, torch.device("cuda", 0))):
        monkeypatch.setattr(launch, "_BYPASSES_TRITON", launches)
        planned = launch.Launch(kernel, device, 5, (48,), (), 8)
        planned(x)
        planned(x)
    assert len(kernel.calls) == 4


def cast(x: torch.Tensor) -> list[torch.Tensor]:
    how = None, None, torch.float8_e4m3fn, True, True
    return torch.ops.float8.cast.default(x, x.new_full((), 0.01), *how)


@pytest.mark.gpu
def test_kernels_are_launched_by_pytorch_after_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else eager mode is slower than it could be, and nobody notices."""
    if not launch._BYPASSES_TRITON:
        pytest.skip("FLOAT8_PLAIN_LAUNCH=1")
    x = torch.randn(96, 160, device="cuda")
    want = cast(x)
    launched: list[str] = []
    launch_kernel = private.launch_kernel

    def spy(*args: object) -> object:
        launched.append("")
        return launch_kernel(*args)

    monkeypatch.setattr(private, "launch_kernel", spy)
    assert all(map(same_bytes, cast(x), want))
    assert launched


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
    with ThreadPoolExecutor() as thread:
        got = thread.submit(cast, x).result()
    assert all(map(same_bytes, got, want))
