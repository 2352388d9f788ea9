"""Devices that have no GEMM in float8; `linear/test_values.py`: what the others compute."""

import importlib

import pytest
import torch

from float8.formats import lacks_float8_gemm
from float8.gemm import Gemm, matmul
from float8.scales import Operand
from support.devices import E4M3


def test_a_device_without_float8_names_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("float8.gemm")
    monkeypatch.setattr(module, "lacks_float8_gemm", lambda *_, **__: "an old GPU")
    a = Operand(torch.empty(16, 16, dtype=E4M3, device="meta"), torch.empty((), device="meta"))
    with pytest.raises(RuntimeError, match=r"an old GPU; set emulate=True"):
        matmul(a, a, (16, 16), gemm=Gemm(), out_dtype=torch.float32)


def test_amd_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    reason = lacks_float8_gemm.__wrapped__(torch.device("cuda"))  # not what a cache knows
    assert "AMD GPUs are not supported" in reason
