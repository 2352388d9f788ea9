"""`float8 bench` as users call it, on the CPU."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from float8_lab.bench import matmul
from float8_lab.cli.main import main
from float8_lab.cli.table import print_table

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CPU = ["--device", "cpu", "--rounds", "1"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working folder, and one thread for tiny tensors."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_matmul_prints_a_table_and_writes_what_it_takes_to_repeat_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--mkn", "64,64,64", "--mkn", "32,64,32", "-o", "x.json", "--plot", "x.png"]
    assert main(["bench", "matmul", *words, *CPU]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r"GEMM +M +K +N +variant +ms +TFLOP/s +speedup", out)
    assert re.search(r"32 +64 +32 +float8 fast accum +\d+\.\d+", out)
    assert "(host times)" in out
    results = json.loads(Path("x.json").read_text())
    assert results["benchmark"] == "matmul"
    assert len(results["rows"]) == 6
    shapes = {"given": [[64, 64, 64], [32, 64, 32]]}
    assert results["settings"] == {"shapes": shapes, "gradients": False, "rounds": 1}
    assert {"device", "torch", "git_commit", "command"} <= results["environment"].keys()
    assert Path("x.png").exists()


def test_cast_checks_then_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cast", "--mkn", "32,32,32", "-o", "x.csv", *CPU]) == 0
    out = capsys.readouterr().out
    assert "compared with the plain-torch twins: bitwise equal" in out
    assert re.search(r"host time per eager call, transpose: [\d.]+ us", out)
    rows = [line for line in Path("x.csv").read_text().splitlines() if line[0] != "#"]
    assert {row["case"] for row in csv.DictReader(rows)} >= {"copy", "amax", "cast row+col"}


def test_linear_shows_recipes_and_missing_peers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["--mkn", "32,32,32", "--recipe", "tensorwise", "--mode", "eager", "--peers"]
    assert main(["bench", "linear", *words, "torchao,te", *CPU]) == 0
    out = capsys.readouterr().out
    assert "torchao is not installed: left out\nte is not installed: left out\n" in out
    assert re.search(r"32 +32 +32 +tensorwise +eager", out)
    assert re.search(r"host time to issue forward \+ backward, tensorwise: \d+ us", out)


def test_block(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny", "--blocks", "1", "--seq-len", "32", "--mode", "eager"]
    assert main(["bench", "block", *words, "-o", "x.json", *CPU]) == 0
    assert "1 tiny block(s), 1 x 32 tokens, forward + backward" in capsys.readouterr().out
    results = json.loads(Path("x.json").read_text())
    assert [row["recipe"] for row in results["rows"]] == ["bf16", "tensorwise", "delayed"]
    assert results["rows"][0]["sqnr_db"] is None  # the reference itself
    assert results["settings"]["blocks"] == 1


def test_block_of_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny", "--blocks", "1", "--seq-len", "32", "--mode", "eager"]
    words += ["--recipe", "tensorwise", "--microbatches", "2"]
    assert main(["bench", "block", *words, "-o", "x.json", *CPU]) == 0
    out = capsys.readouterr().out
    assert "forward + backward of 2 microbatches" in out
    assert re.search(r"tensorwise\+held +eager +[\d.]+", out)
    assert json.loads(Path("x.json").read_text())["settings"]["microbatches"] == 2


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_profile(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny", "--seq-len", "32", "--mode", "eager", "--recipe", recipe]
    assert main(["bench", "profile", *words, "--traces", "here", "--device", "cpu"]) == 0
    assert re.search(r"backward +GEMM +\d+", capsys.readouterr().out)
    assert Path("here/forward.json").exists()
    assert Path("here/backward.json").exists()


def test_a_wrong_result_is_one_line_and_no_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(a, b, **options):
        return torch.zeros(a.data.shape[0], b.data.shape[0], dtype=torch.bfloat16)

    monkeypatch.setattr(matmul, "matmul", wrong)
    assert main(["bench", "matmul", "--mkn", "32,32,32", "-o", "x.json", *CPU]) == 1
    assert re.match(
        r"error: matmul output 32,32,32 float8: SQNR .* nothing was timed\n$",
        capsys.readouterr().err,
    )
    assert not Path("x.json").exists()


def test_what_does_not_fit_the_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny", "--batch", "100000000000", "--device", "cpu"]
    assert main(["bench", "block", *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: too large for the memory: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("width", [60, 80, 120])
def test_numbers_of_a_table_are_whole_however_narrow_the_terminal(width: int) -> None:
    results = json.loads((RESULTS / "h200-fsdp-llama3-8b.json").read_text())
    console = Console(width=width, file=io.StringIO(), markup=False, soft_wrap=True)
    print_table(console, "FSDP", results["rows"])
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    numbers = ["187.6", "174,702", "1.34", "6,980", "3,490", "0.2240", "4.468", "9.686", "10%"]
    for number in numbers:
        assert re.search(rf"(?<!\S){re.escape(number)}(?!\S)", text), number
    tables = {60: 3, 80: 2, 120: 1}[width]
    assert text.count("FSDP") == text.count("recipe") == tables


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["matmul", *CPU], "no shapes: give --shapes"),
        (["matmul", "--mkn", "64,64", *CPU], "shape: got '64,64', expected M,K,N"),
        (["linear", "--shapes", "round", *CPU], "shapes: got 'round', expected one of llama3-8b"),
        (["linear", "--mkn", "32,32,32", "--mode", "lazy", *CPU], "mode: got 'lazy'"),
        (["linear", "--mkn", "32,32,32", "--recipe", "fp7", *CPU], "recipe: got 'fp7'"),
        (["linear", "--mkn", "32,32,32", "--peers", "apex", *CPU], "peer: got 'apex'"),
        (["cast", "--mkn", "32,32,32", "-o", "x.txt", *CPU], "output: got 'x.txt'"),
        (["block", "--model", "huge", *CPU], "unknown model 'huge'"),
        (["profile", "--mode", "both", "--device", "cpu"], "mode: got 'both'"),
        (["fsdp", "--model", "huge", *CPU], "unknown model 'huge'"),
        (["fsdp", "--recipe", "fp7", *CPU], "recipe: got 'fp7'"),
        (["fsdp", "--peers", "te", *CPU], "peers: got 'te', expected torchao"),
        (["fsdp", "--device", "cuda:1"], "device: got 'cuda:1', expected cuda or cpu"),
    ],
)
def test_user_errors_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_help_offers_what_is_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "fsdp", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Timed steps in each of two passes" in out
    assert "cuda:N" not in out
    assert "TransformerEngine" not in out
    for command in ("train", "plan"):
        assert main([command, "--help"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "one of tensorwise, delayed, rowwise, " in out.replace("One", "one")


@pytest.mark.parametrize("name", ["matmul", "cast", "linear", "block", "profile", "fsdp"])
def test_without_a_gpu_it_says_so(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shapes = [] if name in ("block", "profile", "fsdp") else ["--mkn", "32,32,32"]
    assert main(["bench", name, *shapes]) == 2
    assert capsys.readouterr().err.startswith(
        "error: device 'cuda' is not there: no CUDA GPU here, use --device cpu"
    )
