"""Launching compiled kernels: which of them PyTorch's launcher takes, and how it is called."""

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from float8.kernels.runtime import launch, private
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
    made = iter([_Memory(8192), _Memory(16384)] * 9)
    monkeypatch.setattr(launch, "_LAUNCHES", True)
    monkeypatch.setattr(launch, "_binaries", {})
    monkeypatch.setattr(private, "current_device", lambda: 0)
    monkeypatch.setattr(private, "current_stream", lambda index: 77)
    monkeypatch.setattr(private, "empty_strided_cuda", lambda *shape: next(made))
    monkeypatch.setattr(private, "launch_kernel", lambda *args: calls.append(args))
    monkeypatch.setattr(torch, "empty_strided", lambda *shape, **how: next(made))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    kernel = _Kernel()
    device = torch.device("cuda", 0)

    def planned(n: int) -> launch.Program:
        """x is read, y written, and of y a second kernel makes z, which is returned."""
        x, y, z = (
            launch.Slot(torch.bfloat16, device=device),
            *(launch.new((8,), torch.float32) for _ in "yz"),
        )
        first = launch.Launch(kernel, 5, (x, None, y), (n, 1), ("constant",), num_warps=8)
        second = launch.Launch(kernel, 6, (y, z), (n, 1), ("constant",), num_warps=8)
        return launch.Program([x], [z], [first, second])

    aligned: Any = _Memory(4096)
    unaligned: Any = _Memory(4098)
    one = planned(48)
    for x in (aligned, aligned, unaligned, aligned):
        assert [z.data_ptr() for z in one(x)] == [8192]
    assert planned(64)(aligned)  # another shape, the same kernels
    assert planned(47)(aligned)  # Triton compiles these anew

    def launched(n: int) -> list[tuple[Any, ...]]:
        how = (1, 1, 8, 64, "OOiOO")
        return [
            (1234, 5, *how, (4096, 16384, n, None, None), 77),
            (1234, 6, *how, (16384, 8192, n, None, None), 77),
        ]

    assert calls == [*launched(48), *launched(48), *launched(64)]
    by_triton = [[4096, None, 16384], [16384, 8192, 48], [4098, None, 16384], [16384, 8192, 48]]
    assert [[getattr(a, "address", a) for a in args[:3]] for _, args, _ in kernel.calls] == [
        *by_triton,
        [4096, None, 16384],
        [16384, 8192, 47],
    ]


def test_what_is_not_known_of_a_kernel_leaves_it_to_triton() -> None:
    assert _binary(None) is None
    without = compiled(SIGNATURE)
    del without.metadata.shared
    assert _binary(without) is None


def test_unknown_types_are_left_to_triton() -> None:
    assert _binary(compiled(SIGNATURE | {"f": "fp32"})) is None


def cast(x: torch.Tensor) -> list[torch.Tensor]:
    return torch.ops.float8.cast.default(x, x.new_full((), 0.01), torch.float8_e4m3fn, True, True)


@pytest.mark.gpu
def test_kernels_are_launched_by_pytorch_after_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else eager mode is slower than it could be, and nobody notices."""
    if not launch._LAUNCHES:
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
    got: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: got.extend(cast(x)))
    thread.start()
    thread.join()
    for a, b in zip(got, want, strict=True):
        assert same_bytes(a, b)
