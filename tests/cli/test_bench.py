"""`float8 bench` as users call it, on the CPU."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from float8_lab.bench.step import Step
from float8_lab.cli.main import main
from float8_lab.cli.table import print_table
from support.rings import short

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CPU = ["--device", "cpu", "--rounds", "1"]
BLOCK = "--model tiny --blocks 1 --seq-len 32 --mode eager"
EACH = [
    (
        f"model {BLOCK} --recipe tensorwise,delayed+held --checkpointing full --rounds 1",
        3,
        r"1 block of tiny, 1 x 32 tokens, forward[\s\S]+delayed\+held +eager +full +[\d.]+",
    ),
    (f"profile {BLOCK} --recipe tensorwise", 2, r"tensorwise +eager +[\d.]+"),
    (
        "experts --shape 2,1024,32,32 --recipe tensorwise+held --rounds 1",
        2,
        r"tensorwise\+held( +[-\d.,]+){3} +\d\d\.\d",
    ),
]


@pytest.mark.parametrize(
    ("words", "rows", "shown"), short({0}, EACH), ids=lambda words: str(words)[:9]
)
def test_each_benchmark_prints_its_rows_and_writes_what_it_takes_to_repeat_it(
    words: str,
    rows: int,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["bench", *words.split(), "--device", "cpu", "-o", "x.json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(shown, out)
    results = json.loads(Path("x.json").read_text())
    assert len(results["rows"]) == rows
    assert results["benchmark"] == words.split()[0]
    if words.startswith(("model", "profile")):  # those of a user's model; on a CPU, all
        assert results["settings"]["all_layers"] is False
    assert {"device", "torch", "git_commit", "command"} <= results["environment"].keys()
    assert float("inf") not in results["rows"][0].values()  # no JSON


def test_missing_peers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = [*BLOCK.split(), "--peers", "torchao", "-o", "x.json"]
    assert main(["bench", "model", *words, *CPU]) == 0
    assert "torchao is not installed: left out\n" in capsys.readouterr().out
    rows = json.loads(Path("x.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["bf16", "tensorwise", "delayed"]


def test_a_wrong_result_is_one_line_and_not_in_the_file(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Step, "at_least", 1e3)
    said = refused("bench", "model", *BLOCK.split(), "-o", "x.json", *CPU, code=1)
    assert re.match(r"tensorwise, eager: .*SQNR .* nothing was timed\n$", said)
    assert [row["recipe"] for row in json.loads(Path("x.json").read_text())["rows"]] == ["bf16"]
    words = ["--model", "tiny", "--batch", "100000000000", "--device", "cpu"]
    assert refused("bench", "model", *words, code=1).startswith("too large for the memory: ")


@pytest.mark.parametrize("width", [80, 120])
def test_numbers_of_a_table_are_whole(width: int) -> None:
    results = json.loads((RESULTS / "h200-train-8b.json").read_text())
    file = io.StringIO()
    print_table(Console(width=width, file=file, soft_wrap=True), "8B", results["rows"])
    assert max(map(len, file.getvalue().splitlines())) <= width
    for number in ["648.6", "12,630", "1.31", "75.47", "17.8"]:
        assert re.search(rf"(?<!\S){re.escape(number)}(?!\S)", file.getvalue()), number


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model --recipe fp7", "recipe: got 'fp7', expected one of"),
        ("model -o x.txt", "output: got 'x.txt', expected a name ending in .json"),
        ("model -o no/x.json", "output: there is no folder no"),
        ("model --mode lazy", "mode: got 'lazy', expected one of eager"),
        ("model --peers apex", "peers: got 'apex', expected torchao"),
        ("model --checkpointing all", "checkpointing: got 'all', expected one of off, float8, f"),
        ("train --model huge", "unknown model 'huge'"),
        (
            "train --microbatches 2 --mode graphed",
            "microbatches: got 2 with mode graphed, expected",
        ),
        ("model --model olmoe", "unknown model 'olmoe': choose one of tiny"),
        ("tp --model olmoe", "unknown model 'olmoe': choose one of tiny"),
        ("model --recipe tensorwise+head", "recipe: got +head, which only train takes"),
        ("train --lora --ranks 2", "--lora got --ranks 2, expected 1"),
        ("train --recipe tensorwise+only", "recipe: got +only, expected --lora"),
        ("tp --peers te", "peers: got 'te', expected torchao"),
        ("tp --device cuda:1", "device: got 'cuda:1', expected cuda or cpu"),
        ("experts --recipe delayed", "recipe: got 'delayed' with delayed scaling"),
    ],
)
def test_user_errors_are_one_line(words: str, message: str, refused: Callable[..., str]) -> None:
    device = [] if "cuda" in words else ["--device", "cpu"]
    assert refused("bench", *words.split(), *device).startswith(message)


def test_without_a_gpu_it_says_so(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = "device 'cuda' is not there: no CUDA GPU here, use --device cpu\n"
    for words in (["bench", "model"], ["bench", "tp"], ["train", "--device", "cuda"]):
        assert refused(*words).endswith(expected)
