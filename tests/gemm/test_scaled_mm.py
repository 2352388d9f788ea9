"""The scaled GEMM and its emulation, against float64 on the same operands."""

import importlib

import pytest
import torch

import tolerances
from float8.gemm import scaled_mm
from sqnr import sqnr
from support.devices import DTYPES, E4M3, E5M2, on_devices
from support.models import seeded


def operands(format_a: torch.dtype, format_b: torch.dtype, device: str):
    """`a [M, K], scale_a, b [N, K], scale_b`."""
    a = seeded(0, 7, 96, device=device).mul(50).to(format_a)
    b = seeded(1, 48, 96, device=device).mul(50).to(format_b)
    return a, torch.tensor(0.25, device=device), b, torch.tensor(0.5, device=device)


FORMATS = pytest.mark.parametrize(
    ("format_a", "format_b"),
    [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
    ids=["e4m3-e4m3", "e5m2-e4m3", "e4m3-e5m2"],
)


@on_devices
@FORMATS
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("emulate", [False, True], ids=["float8", "emulated"])
@pytest.mark.parametrize("use_fast_accum", [False, True], ids=["", "fast"])
def test_product(device, format_a, format_b, out_dtype, emulate, use_fast_accum) -> None:
    a, scale_a, b, scale_b = operands(format_a, format_b, device)
    got = scaled_mm(
        a,
        scale_a,
        b,
        scale_b,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        emulate=emulate,
    )
    wanted = (a.double() * scale_a.double()) @ (b.double() * scale_b.double()).t()
    assert got.dtype == out_dtype
    assert got.shape == (7, 48)
    assert sqnr(wanted, got) > tolerances.GEMM


@on_devices
@pytest.mark.parametrize("emulate", [False, True], ids=["float8", "emulated"])
def test_autocast_leaves_the_product_alone(device: str, emulate: bool) -> None:
    a, scale_a, b, scale_b = operands(E4M3, E4M3, device)

    def run() -> torch.Tensor:
        return scaled_mm(a, scale_a, b, scale_b, out_dtype=torch.float32, emulate=emulate)

    wanted = run()
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(run(), wanted)


@on_devices
def test_emulation_takes_any_dims(device: str) -> None:
    a, b = seeded(0, 3, 5, device=device).to(E4M3), seeded(1, 7, 5, device=device).to(E4M3)
    one = torch.ones((), device=device)
    got = scaled_mm(a, one, b, one, out_dtype=torch.float32, emulate=True)
    assert sqnr(a.double() @ b.double().t(), got) > tolerances.GEMM


def test_a_device_without_float8_names_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("float8.gemm.scaled_mm")
    monkeypatch.setattr(module, "lacks_float8_gemm", lambda device: "an old GPU")
    a = torch.empty(16, 16, dtype=E4M3, device="meta")
    one = torch.empty((), device="meta")
    with pytest.raises(RuntimeError, match=r"an old GPU; set emulate=True"):
        scaled_mm(a, one, a, one, out_dtype=torch.float32)
