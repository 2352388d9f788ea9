"""`float8 plan` as users call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from float8.cli.main import main


@pytest.fixture(autouse=True)
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_it_estimates_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3-8b", "--tokens", "8192", "-o", "x.json"]) == 0
    out = capsys.readouterr().out
    assert "llama3-8b, tensorwise, 8192 tokens: estimated for h100" in out
    assert re.search(r"4096 +14336 +64 +gate up +[\d.]+ +[\d.]+ +1\.\d\d +convert", out)
    assert re.search(r"4096 +128256 +1 +output .* leave: output head", out)
    assert re.search(r"forward \+ backward, with [\d.]+ ms of attention .*: 1\.\d\dx", out)
    results = json.loads(Path("x.json").read_text())
    *layers, total = results["rows"]
    assert total["count"] == sum(row["count"] for row in layers) == 7 * 32 + 1
    assert total["all_bf16_ms"] == pytest.approx(sum(row["all_bf16_ms"] for row in layers), 1e-4)
    assert total["all_planned_ms"] < total["all_bf16_ms"]
    assert 1 < results["extra"]["step_speedup"] < results["extra"]["linear_speedup"]


def test_few_tokens_leave_all_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "150m", "--tokens", "64", "--ceilings", "h200"]) == 0
    out = capsys.readouterr().out
    assert "estimated for h200" in out
    assert "convert" not in out
    assert "all linear layers: 1.00x of bf16" in out


def test_measured_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "tiny", "--tokens", "32", "--measure", "--device", "cpu"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "tiny, tensorwise, 32 tokens: measured for " in out
    assert "attention" not in out  # Nothing is known of this device.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure"], "no CUDA GPU here"),
        (["--model", "huge"], "unknown model 'huge'"),
        (["--recipe", "fp7"], "recipe: got 'fp7'"),
        (["--ceilings", "abacus"], "ceilings: got 'abacus', expected one of h100, h200"),
        (["--ceilings", "h100", "--measure"], "--ceilings is for estimates"),
        (["--device", "cpu"], "--device is where to measure"),
        (["-o", "x.txt"], "output: got 'x.txt'"),
    ],
)
def test_user_errors_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
