"""`float8 bench` as users call it, on the CPU."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from float8_lab.bench import matmul
from float8_lab.cli.main import main
from float8_lab.cli.table import print_table

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CPU = ["--device", "cpu", "--rounds", "1"]


def test_matmul_prints_a_table_and_writes_what_it_takes_to_repeat_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--mkn", "64,64,64", "--mkn", "32,64,32", "-o", "x.json"]
    assert main(["bench", "matmul", *words, *CPU]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r"M +K +N +variant +ms +TFLOP/s +speedup", out)
    assert re.search(r"32 +64 +32 +float8 fast accum +\d+\.\d+", out)
    results = json.loads(Path("x.json").read_text())
    assert results["benchmark"] == "matmul"
    assert len(results["rows"]) == 6
    shapes = [[64, 64, 64], [32, 64, 32]]
    assert results["settings"] == {"shapes": shapes, "rounds": 1}
    assert {"device", "torch", "git_commit", "command"} <= results["environment"].keys()


def test_linear_draws_what_it_measured_or_what_a_file_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--mkn", "64,64,64", "--mode", "eager", "--recipe", "tensorwise"]
    assert main(["bench", "linear", *words, *CPU, "-o", "x.json", "--plot", "x.png"]) == 0
    assert main(["bench", "linear", "--results", "x.json", "--plot", "y.png"]) == 0
    assert capsys.readouterr().out.endswith("plot: y.png\n")
    assert Path("x.png").read_bytes() == Path("y.png").read_bytes()
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


def test_linear_shows_recipes_and_missing_peers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["--mkn", "32,32,32", "--mkn", "16,16,16", "--seconds", "1", "--gpu-time"]
    words += ["--recipe", "tensorwise", "--mode", "eager", "--peers", "torchao"]
    monkeypatch.setattr("time.monotonic", iter(range(0, 100, 2)).__next__)  # none is left
    assert main(["bench", "linear", *words, *CPU]) == 0
    out = capsys.readouterr().out
    assert "torchao is not installed: left out\n" in out
    assert re.search(r"32 +32 +32 +tensorwise +eager", out)
    assert "16  16" not in out


BLOCK = "--model tiny --blocks 1 --seq-len 32 --mode eager"
EACH = [
    ("cast --mkn 32,32,32 --rounds 1", 0, r"cast row\+col +[\d.]+"),
    (
        f"model {BLOCK} --recipe tensorwise,delayed+held --keep nothing --rounds 1"
        " --microbatches 2",
        3,
        r"1 block of tiny, 1 x 32 tokens, forward \+ backward of 2 microbatches"
        r"[\s\S]+delayed\+held +eager +nothing +[\d.]+",
    ),
    (
        "model --model tiny --blocks 1 --seq-len 32 --mode eager --widths 64,128 --rounds 1 "
        "--recipe rowwise",
        4,
        r"64 +rowwise[\s\S]+128 +bf16 +eager +[\d.]+ +[\d,]+ +1.00",
    ),
    (
        f"profile {BLOCK} --recipe tensorwise",
        2,
        r"tensorwise +eager +[\d.]+[\s\S]+the sum beside its floor[\s\S]+tensorwise +eager +[\d.]+",
    ),
    (
        "numerics --mkn 64,48,32 --recipe rowwise_with_gw_hp,rowwise",
        5 * 3,
        r"hot tokens +rowwise +(\d\d\.\d +){3}",
    ),
    (
        "experts --shape 2,1024,32,32 --recipe tensorwise+held --rounds 1",
        16,
        r"tensorwise\+held +[\d.,]+ +[\d.]+ +0\.\d\d +\d\d\.\d",
    ),
    (
        "one-start --data text.txt --model tiny --seq-len 16 --steps 3 --start 2 --recipe rowwise",
        3,
        "validation losses in nats per byte after step 3",
    ),
    (
        "one-start --data text.txt --model tiny --seq-len 16 --steps 3 --start 2 --recipe rowwise "
        "--seeds 2",
        6,
        r"8/8\s+validation losses[\s\S]+mean of 2 seeds[\s\S]+rowwise( +[-\d.]+){3}"
        r"[\s\S]+seed 0[\s\S]+seed 1[\s\S]+rowwise( +[-\d.]+){2} ",
    ),
]


@pytest.mark.parametrize(("words", "rows", "shown"), EACH, ids=lambda words: str(words)[:9])
def test_each_benchmark_prints_and_writes_its_rows(
    words: str, rows: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is in them is checked in `tests/bench`."""
    Path("text.txt").write_text("\n".join(f"{i} and {i * i % 97} pears" for i in range(900)))
    output = ["-o", "x.json"] * bool(rows)
    assert main(["bench", *words.split(), "--device", "cpu", *output]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(shown, out)
    if rows:
        results = json.loads(Path("x.json").read_text())
        assert len(results["rows"]) == rows
        assert results["settings"]
        if words.startswith(("model", "profile")):  # those of a user's model; on a CPU, all
            assert results["settings"]["all_layers"] is False
        assert float("inf") not in results["rows"][0].values()  # no JSON


def test_a_wrong_result_is_one_line_and_no_file(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(a, b, **options):
        return torch.zeros(a.data.shape[0], b.data.shape[0], dtype=torch.bfloat16)

    monkeypatch.setattr(matmul, "matmul", wrong)
    said = refused("bench", "matmul", "--mkn", "32,32,32", "-o", "x.json", *CPU, code=1)
    assert re.match(r"matmul 32,32,32 float8: SQNR .* nothing was timed\n$", said)
    assert not Path("x.json").exists()


def test_what_does_not_fit_the_memory_is_one_line(refused: Callable[..., str]) -> None:
    words = ["--model", "tiny", "--batch", "100000000000", "--device", "cpu"]
    assert refused("bench", "model", *words, code=1).startswith("too large for the memory: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_of_one_start_end_with_it(number: signal.Signals) -> None:
    words = "bench one-start --data text.txt --model tiny --device cpu --seq-len 16 --steps 100000 "
    words += "--start 1 --seeds 2 --at-once 2"
    Path("text.txt").write_text("some words of a text " * 2000)
    Path("kept").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-um", "float8_lab.cli.main", *words.split()],
        env={**os.environ, "TMPDIR": str(Path("kept").absolute())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    told = [next(process.stdout) for _ in range(3)]  # the device, and that both starts are there
    os.kill(process.pid, number)
    rest = process.stdout.read()  # until none of its processes is left, which have it open
    assert (process.wait(), rest) == (130, ""), told
    assert not [*Path("kept").rglob("*.pt")], "starts may be large"


@pytest.mark.parametrize("width", [80, 120])
def test_numbers_of_a_table_are_whole(width: int) -> None:
    results = json.loads((RESULTS / "h200-fsdp-llama3-8b.json").read_text())
    file = io.StringIO()
    console = Console(width=width, file=file, markup=False, soft_wrap=True)
    print_table(console, "FSDP", results["rows"])
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    numbers = ["187.6", "174,702", "1.34", "6,980", "3,490", "0.2240", "9.686"]
    for number in numbers:
        assert re.search(rf"(?<!\S){re.escape(number)}(?!\S)", text), number


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["matmul", *CPU], "no shapes: give --shapes"),
        (["matmul", "--mkn", "64,64", *CPU], "shape: got '64,64', expected M,K,N"),
        (["linear", "--shapes", "round", *CPU], "shapes: got 'round', expected one of llama3-8b"),
        (["linear", "--plot", "x.pdf", *CPU], "plot: got 'x.pdf', expected a name ending in .png"),
        (["linear", "--results", "x.json"], "results: got a file to draw, expected --plot"),
        (["linear", "--mkn", "32,32,32", "--mode", "lazy", *CPU], "mode: got 'lazy'"),
        (
            ["linear", "--mkn", "32,32,32", "--mode", "all", "--gpu-time", *CPU],
            "mode: got 'all' with --gpu-time, expected eager, compiled or both",
        ),
        (["model", "--widths", "x", *CPU], "widths: got 'x', expected whole numbers"),
        (["model", "--widths", "512,700", *CPU], "width: got 700, expected a positive multiple"),
        (
            ["numerics", "--peers", "torchao+auto_filter", "--device", "cpu"],
            "peers: got 'torchao+auto_filter', expected torchao: its filter is not for single",
        ),
        (["fsdp", "--mode", "graphed", *CPU], "mode: got graphed on ranks, expected eager"),
        (["linear", "--mkn", "32,32,32", "--peers", "apex", *CPU], "peers: got 'apex'"),
        (["numerics", "--recipe", "fp7", "--device", "cpu"], "recipe: got 'fp7', expected one of"),
        (["cast", "--mkn", "32,32,32", "-o", "x.txt", *CPU], "output: got 'x.txt'"),
        (["profile", "--traces", "none", "--device", "cpu"], "traces: there is no folder none"),
        (["model", "--keep", "all", *CPU], "keep: got 'all', expected some of nothing, gemms"),
        (
            ["train", "--checkpointing", "all", *CPU],
            "checkpointing: got 'all', expected",
        ),
        (["train", "--lora", "--ranks", "2", *CPU], "--lora got --ranks 2, expected 1"),
        (["train", "--plot", "x.png", *CPU], "plot: got the device cpu, whose memory is not"),
        (["fsdp", "--model", "huge", *CPU], "unknown model 'huge'"),
        (["experts", "--recipe", "delayed", *CPU], "recipe: got 'delayed' with delayed scaling"),
        (["one-start", "--steps", "3", "--start", "3", "--device", "cpu"], "start: got 3"),
        (["one-start", "--recipe", "high_precision", "--device", "cpu"], "recipe: got 'high_prec"),
        (["train", "--recipe", "tensorwise+only", *CPU], "recipe: got +only, expected --lora"),
        (["tp", "--peers", "te", *CPU], "peers: got 'te', expected torchao"),
        (["fsdp", "--device", "cuda:1"], "device: got 'cuda:1', expected cuda or cpu"),
    ],
)
def test_user_errors_are_one_line(
    words: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert refused("bench", *words).startswith(message)


@pytest.mark.parametrize("name", ["matmul", "fsdp"])
def test_without_a_gpu_it_says_so(
    name: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shapes = [] if name == "fsdp" else ["--mkn", "32,32,32"]
    expected = "device 'cuda' is not there: no CUDA GPU here, use --device cpu"
    assert refused("bench", name, *shapes).startswith(expected)
    assert refused("train", "--device", "cuda").endswith(f"{expected}\n")  # all have that option
