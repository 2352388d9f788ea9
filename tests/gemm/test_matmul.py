"""The scaled GEMM and its emulation, against float64 on the same operands."""

import importlib

import pytest
import torch

import tolerances
from float8.formats import lacks_float8_gemm
from float8.gemm import Gemm, matmul
from float8.scales import Operand
from sqnr import sqnr
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded


def operands(format_a: torch.dtype, format_b: torch.dtype, device: str):
    """`a` [M, K] and `b` [N, K]."""
    a = seeded(0, 7, 96, device=device).mul(50).to(format_a)
    b = seeded(1, 48, 96, device=device).mul(50).to(format_b)
    scales = torch.tensor([0.25, 0.5], device=device).unbind()
    return [*map(Operand, (a, b), (scale.clone() for scale in scales))]


FORMATS = pytest.mark.parametrize(
    ("format_a", "format_b"),
    [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
    ids=["e4m3-e4m3", "e5m2-e4m3", "e4m3-e5m2"],
)


@on_devices
@FORMATS
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("gemm", [Gemm(), Gemm(use_fast_accum=True), Gemm(emulate=True)], ids=str)
def test_product(device, format_a, format_b, out_dtype, gemm) -> None:
    a, b = operands(format_a, format_b, device)
    got = matmul(a, b, gemm=gemm, out_dtype=out_dtype)
    wide_a, wide_b = (part.data.double() * part.scale.double() for part in (a, b))
    wanted = wide_a @ wide_b.t()
    assert got.dtype == out_dtype
    assert got.shape == (7, 48)
    assert sqnr(wanted, got) > tolerances.GEMM


def test_a_device_without_float8_names_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("float8.gemm")
    monkeypatch.setattr(module, "lacks_float8_gemm", lambda *_, **__: "an old GPU")
    a = Operand(torch.empty(16, 16, dtype=E4M3, device="meta"), torch.empty((), device="meta"))
    with pytest.raises(RuntimeError, match=r"an old GPU; set emulate=True"):
        matmul(a, a, gemm=Gemm(), out_dtype=torch.float32)


def test_amd_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    reason = lacks_float8_gemm.__wrapped__(torch.device("cuda"))  # not what a cache knows
    assert "AMD GPUs are not supported" in reason
