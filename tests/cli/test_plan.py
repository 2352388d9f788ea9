"""`float8 plan` as users call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from float8.convert import smallest
from float8.convert.smallest import Smallest
from float8_lab.cli.main import main


@pytest.fixture(autouse=True)
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_it_judges_by_size_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3-8b", "--tokens", "8192", "-o", "x.json"]) == 0
    out = capsys.readouterr().out
    assert "llama3-8b, tensorwise, 8192 tokens: judged by size for H100" in out
    assert re.search(r"4096 +14336 +64 +gate up +convert", out)
    assert re.search(r"4096 +128256 +1 +output +leave: output head", out)
    assert " ms" not in out  # Nothing was measured.
    assert "all linear layers" not in out
    results = json.loads(Path("x.json").read_text())
    assert sum(row["count"] for row in results["rows"]) == 7 * 32 + 1
    assert results["extra"] == {}


def test_few_tokens_leave_all_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "150m", "--tokens", "64", "--gpu", "H200"]) == 0
    out = capsys.readouterr().out
    assert "judged by size for H200" in out
    assert "convert" not in out
    assert "leave: tokens=64 is less than" in out


def test_each_recipe_is_judged_by_its_own_limits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"rowwise": Smallest(1, 1, 1e15)}
    monkeypatch.setattr(smallest, "SMALLEST", {"H100": limits})
    assert main(["plan", "--model", "150m", "--recipe", "rowwise", "--by-size"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "150m, rowwise, 8192 tokens: judged by size for H100" in out
    assert "is less than 1e+15" in out


def test_measured_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "tiny", "--tokens", "32", "--measure", "--device", "cpu"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "tiny, tensorwise, 32 tokens: measured for " in out
    assert re.search(r"all linear layers: \d\.\d\dx of bf16", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure"], "device 'cuda' is not there: no CUDA GPU here"),
        (["--model", "huge"], "unknown model 'huge'"),
        (["--recipe", "fp7"], "recipe: got 'fp7'"),
        (["--gpu", "abacus"], "gpu: got 'abacus', expected one of H100, H200"),
        (["--gpu", "H100", "--measure"], "--gpu is for judging by size"),
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
