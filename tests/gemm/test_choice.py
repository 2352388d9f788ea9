"""Which kernel is chosen, from tables made up and from the one that is shipped."""

import pytest
import torch

from float8.cost import KNOWN
from float8.gemm import GemmKernel, MeasuredGemm, choice, choose_kernel, kernel_table
from float8.gemm.choice import MARGIN, VECTORS_US, kernel_for
from support.devices import E4M3, E5M2

TENSORWISE, ROWWISE = GemmKernel.TENSORWISE, GemmKernel.ROWWISE
H100 = kernel_table(KNOWN["h100"])
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}

GAINS = MeasuredGemm(8192, 4096, 4096, "e4m3", 200.0, 190.0)
LOSES = MeasuredGemm(8192, 4096, 1024, "e4m3", 60.0, 61.0)
TABLE = (GAINS, LOSES)


@pytest.mark.parametrize("gemm", H100, ids=str)
def test_what_was_measured_gets_the_faster_kernel(gemm: MeasuredGemm) -> None:
    gain = gemm.tensorwise_us - gemm.rowwise_us
    wanted = ROWWISE if gain > VECTORS_US + MARGIN * gemm.tensorwise_us else TENSORWISE
    assert choose_kernel(H100, *gemm[:3], dtype_a=FORMATS[gemm.format_a]) is wanted


def test_the_vectors_and_a_margin_must_be_gained() -> None:
    for rowwise_us, wanted in ((195.9, ROWWISE), (196.1, TENSORWISE)):  # 2 us and 1 % of 200 us
        table = (GAINS._replace(rowwise_us=rowwise_us),)
        assert choose_kernel(table, 8192, 4096, 4096) is wanted


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((8192, 4096, 4096), ROWWISE),
        ((8192, 4096, 1024), TENSORWISE),
        ((8192, 4096, 2064), ROWWISE),  # 4096 is the nearer: a factor of 1.98 to one of 2.02
        ((8192, 4096, 2032), TENSORWISE),
        ((16384, 8192, 8192), ROWWISE),
        ((8001, 4096, 4096), ROWWISE),  # any number of tokens
        ((1024, 1024, 4096), TENSORWISE),  # too small to gain what the vectors cost
        ((1, 4096, 4096), TENSORWISE),
        ((0, 4096, 4096), TENSORWISE),
        ((8192, 4100, 4096), TENSORWISE),
        ((8192, 4096, 4100), TENSORWISE),
        ((8192, 0, 4096), TENSORWISE),
    ],
)
def test_other_shapes_get_what_is_faster_for_the_nearest(
    shape: tuple[int, int, int], wanted: GemmKernel
) -> None:
    assert choose_kernel(TABLE, *shape) is wanted


def test_of_equally_near_ones_that_of_the_format_counts() -> None:
    other = GAINS._replace(format_a="e5m2", rowwise_us=200.0)
    for table in ((GAINS, other), (other, GAINS)):
        assert choose_kernel(table, 8192, 4096, 4096, dtype_a=E4M3) is ROWWISE
        assert choose_kernel(table, 8192, 4096, 4096, dtype_a=E5M2) is TENSORWISE
    assert choose_kernel((GAINS,), 8192, 4096, 4096, dtype_a=E5M2) is ROWWISE


@pytest.mark.parametrize(
    "options",
    [
        {"use_fast_accum": False},
        {"out_dtype": torch.float32},
        {"out_dtype": torch.float16},
        {"dtype_b": E5M2},
        {"table": None},
        {"table": ()},
    ],
    ids=str,
)
def test_what_the_rowwise_kernel_cannot_or_nobody_measured_is_tensorwise(options) -> None:
    options = {"table": TABLE, "M": 8192, "K": 4096, "N": 4096} | options
    assert choose_kernel(**options) is TENSORWISE


def on_the_meta_device(tokens: int = 8192) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.empty(tokens, 4096, dtype=E4M3, device="meta")
    return a, torch.empty(4096, 4096, dtype=E4M3, device="meta")


def test_devices_that_were_not_measured_are_tensorwise() -> None:
    assert choice.table_of(torch.device("cpu")) is None
    assert kernel_for(*on_the_meta_device(), torch.bfloat16) is TENSORWISE


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("NVIDIA H100 80GB HBM3", ROWWISE),
        ("NVIDIA H200", ROWWISE),
        ("NVIDIA H100 PCIe", TENSORWISE),
        ("NVIDIA B200", TENSORWISE),
    ],
)
def test_the_name_of_the_gpu_decides(
    name: str, wanted: GemmKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert choose_kernel(choice.table_of(torch.device("cuda", 0)), 8192, 4096, 6144) is wanted
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choice.table_of(torch.device("cuda", 0)) is None


def test_a_tensor_is_judged_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(choice, "table_of", lambda device: asked.append(device) or TABLE)
    for _ in range(3):
        assert kernel_for(*on_the_meta_device(), torch.bfloat16) is ROWWISE
        assert kernel_for(*on_the_meta_device(), torch.float32) is TENSORWISE
        assert kernel_for(*on_the_meta_device(1), torch.bfloat16) is TENSORWISE
    assert asked == [torch.device("meta")] * 2
