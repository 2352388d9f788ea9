"""`float8 bench numerics` as users call it, on the CPU."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from float8_lab.cli.main import main
from float8_lab.models import presets
from support.nano import NANO

NUMERICS = ["bench", "numerics", "--device", "cpu", "--mkn", "64,48,32"]
LAYERS = ["query", "key", "value", "out", "gate", "up", "down"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small text in an empty working folder, the smallest model, one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(presets.PRESETS, "nano", NANO)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "text.txt").write_text("\n".join(f"{i} and {i * i % 97} pears" for i in range(900)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(*words: str) -> None:
    settings = ["--model", "nano", "--data", "text.txt", "--device", "cpu", "--output", "run"]
    assert main(["train", *settings, "--steps", "3", "--no-tensorboard", *words]) == 0


@pytest.mark.parametrize("recipe", ["high_precision", "delayed"])
def test_a_checkpoint(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    train("--recipe", recipe)
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    capsys.readouterr()
    files = ["-o", "x.json", "--plot", "x.png"]
    assert main([*NUMERICS, "--checkpoint", "run", "--block", "0", *files]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"64,48,32; then block 0 of nano after step 3 of {recipe}" in out
    assert re.search(r"hot tokens +rowwise_with_gw_hp +(\d\d\.\d +){6}", out)
    assert re.search(r"attention.out +delayed( +[\d.e-]+){6}", out)
    results = json.loads(Path("x.json").read_text())
    rows = {(row["case"].split(".")[-1], row["recipe"]): row for row in results["rows"]}
    assert {case for case, _ in rows} >= set(LAYERS)
    assert len(rows) == (5 + 7) * 6
    assert rows["up", "bf16"]["underflow_input"] is None
    for layer in LAYERS:
        assert rows[layer, "bf16"]["sqnr_output"] > 50
        assert 20 < rows[layer, "tensorwise"]["sqnr_grad_weight"] < 40
    extra = {"model": "nano", "recipe": recipe, "step": 3, "block": 0}
    assert results["extra"]["trained"] == extra
    assert Path("x.png").stat().st_size > 10_000
    assert before == {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}


def test_tables_fit_80_columns_and_csv_has_all_of_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train()
    monkeypatch.setattr("float8_lab.cli.progress._PLAIN_WIDTH", 80)
    capsys.readouterr()
    words = ["--checkpoint", "run", "--recipe", "tensorwise", "-o", "x.csv"]
    assert main([*NUMERICS, *words, "--mkn", "16,16,16"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "normal 16,16,16" in out
    lines = [line for line in Path("x.csv").read_text().splitlines() if line[0] != "#"]
    rows = list(csv.DictReader(lines))
    assert len(rows) == (2 * 5 + 7) * 2
    assert float(rows[1]["saturation_grad_output"]) == 0


def test_a_model_that_is_trained_for_it_leaves_no_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(presets.PRESETS, "tiny", NANO)
    monkeypatch.setattr("float8_lab.cli.bench._STEPS", 2)
    assert main([*NUMERICS, "--recipe", "rowwise", "--peers", "torchao"]) == 0
    out = capsys.readouterr().out
    assert "torchao is not installed: left out" in out
    assert "then block 1 of tiny after step 2 of high_precision" in out
    assert [path.name for path in Path().iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint", "run"], "nothing to resume at run"),
        (["--block", "99"], "block: got 99, expected less than"),
        (["--recipe", "fp7"], "recipe: got 'fp7', expected one of"),
        (["--mkn", "17,16,16"], "shape: got '17,16,16'"),
        (["-o", "x.txt"], "output: got 'x.txt'"),
    ],
)
def test_user_errors_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*NUMERICS, *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
