"""`float8 bench` as users call it, on the CPU."""

from __future__ import annotations

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
TINY = ["--model", "tiny", "--blocks", "1", "--seq-len", "32", "--mode", "eager"]


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


def test_cast_checks_then_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cast", "--mkn", "32,32,32", *CPU]) == 0
    out = capsys.readouterr().out
    assert "bitwise equal to their plain-torch twins" in out
    assert re.search(r"cast row\+col +[\d.]+", out)


def test_linear_draws_what_it_measured_or_what_a_file_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--mkn", "64,64,64", "--mode", "eager", "--recipe", "tensorwise"]
    assert main(["bench", "linear", *words, *CPU, "-o", "x.json", "--plot", "x.png"]) == 0
    assert main(["bench", "linear", "--results", "x.json", "--plot", "y.png"]) == 0
    assert capsys.readouterr().out.endswith("heat map: y.png\n")
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


def test_model(capsys: pytest.CaptureFixture[str]) -> None:
    recipes = "tensorwise,delayed+held"
    words = ["--recipe", recipes, "--microbatches", "2", "--keep", "nothing", "--optimizer"]
    assert main(["bench", "model", *TINY, *words, "-o", "x.json", *CPU]) == 0
    out = capsys.readouterr().out
    title = "1 tiny block(s), 1 x 32 tokens, forward + backward of 2 microbatches + optimizer"
    assert title in out
    assert re.search(r"delayed\+held +eager +nothing +[\d.]+", out)
    results = json.loads(Path("x.json").read_text())
    assert [row["recipe"] for row in results["rows"]] == ["bf16", *recipes.split(",")]
    first = results["rows"][0]
    assert first["sqnr_db"] is None  # the reference itself
    assert first["tokens_per_s"] == pytest.approx(2 * 32 / first["ms"] * 1e3, rel=1e-3)
    settings = {"blocks": 1, "microbatches": 2, "keep": ["nothing"], "optimizer": True}
    assert settings.items() <= results["settings"].items()


def test_profile(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "--recipe", "bf16", "--trace", "x.json", "--device", "cpu"]
    assert main(["bench", "profile", *words]) == 0
    assert re.search(r"GEMM +\d+", capsys.readouterr().out)
    assert Path("x.json").exists()


def test_numerics(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mkn", "64,48,32", "--mkn", "2048,16,16", "--recipe", "rowwise_with_gw_hp,rowwise"]
    assert main(["bench", "numerics", *words, "--device", "cpu", "-o", "x.json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"hot tokens +rowwise +(\d\d\.\d +){3}", out)
    rows = json.loads(Path("x.json").read_text())["rows"]
    assert len(rows) == 2 * 5 * 3
    assert rows[0]["sqnr_output"] > 50


def test_experts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "2,64,32,32", "--recipe", "tensorwise+held,rowwise_with_gw_hp"]
    assert main(["bench", "experts", *words, "-o", "x.json", *CPU]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"tensorwise\+held +[\d.,]+ +[\d.]+ +0\.\d\d +\d\d\.\d", out)
    parts = [row["part"] for row in json.loads(Path("x.json").read_text())["rows"]]
    assert {part.partition(": ")[2] for part in parts} == {
        "forward + backward",
        "GEMMs alone",
        "casts alone",
    }
    assert main(["bench", "experts", "--recipe", "delayed", *CPU]) == 2
    assert "delayed scaling" in capsys.readouterr().err


def test_one_start(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("\n".join(f"{i} and {i * i % 97} pears" for i in range(900)))
    words = ["--data", "text.txt", "--model", "tiny", "--seq-len", "16", "--steps", "3"]
    words += ["--start", "2", "--recipe", "rowwise", "--device", "cpu", "-o", "x.json"]
    assert main(["bench", "one-start", *words]) == 0
    assert "validation losses in nats per byte after step 3" in capsys.readouterr().out
    rows = json.loads(Path("x.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["high_precision", "high_precision again", "rowwise"]
    assert {path.name for path in Path().iterdir()} == {"text.txt", "x.json"}
    assert main(["bench", "one-start", *words, "--start", "3"]) == 2
    assert "start: got 3, expected less than the 3 steps" in capsys.readouterr().err


def test_a_wrong_result_is_one_line_and_no_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(a, b, **options):
        return torch.zeros(a.data.shape[0], b.data.shape[0], dtype=torch.bfloat16)

    monkeypatch.setattr(matmul, "matmul", wrong)
    assert main(["bench", "matmul", "--mkn", "32,32,32", "-o", "x.json", *CPU]) == 1
    assert re.match(
        r"error: matmul 32,32,32 float8: SQNR .* nothing was timed\n$",
        capsys.readouterr().err,
    )
    assert not Path("x.json").exists()


def test_what_does_not_fit_the_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny", "--batch", "100000000000", "--device", "cpu"]
    assert main(["bench", "model", *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: too large for the memory: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("width", [80, 120])
def test_numbers_of_a_table_are_whole(width: int) -> None:
    results = json.loads((RESULTS / "h200-fsdp-llama3-8b.json").read_text())
    console = Console(width=width, file=io.StringIO(), markup=False, soft_wrap=True)
    print_table(console, "FSDP", results["rows"])
    text = console.file.getvalue()
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
        (
            ["linear", "--results", str(RESULTS / "h100-cast.json"), "--plot", "x.png"],
            "plot: got r",
        ),
        (["linear", "--results", "x.json"], "results: got a file to draw, expected --plot"),
        (["linear", "--mkn", "32,32,32", "--mode", "lazy", *CPU], "mode: got 'lazy'"),
        (["linear", "--mkn", "32,32,32", "--recipe", "fp7", *CPU], "recipe: got 'fp7'"),
        (["linear", "--mkn", "32,32,32", "--peers", "apex", *CPU], "peers: got 'apex'"),
        (["numerics", "--recipe", "fp7", "--device", "cpu"], "recipe: got 'fp7', expected one of"),
        (["cast", "--mkn", "32,32,32", "-o", "x.txt", *CPU], "output: got 'x.txt'"),
        (["model", "--model", "huge", *CPU], "unknown model 'huge'"),
        (["model", "--keep", "all", *CPU], "keep: got 'all', expected some of nothing, gemms"),
        (["model", "--keep", "gemms", "--transformers", *CPU], "--keep is for plain blocks"),
        (["profile", "--mode", "both", "--device", "cpu"], "mode: got 'both'"),
        (["fsdp", "--model", "huge", *CPU], "unknown model 'huge'"),
        (["fsdp", "--recipe", "fp7", *CPU], "recipe: got 'fp7'"),
        (["tp", "--peers", "te", *CPU], "peers: got 'te', expected torchao"),
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


@pytest.mark.parametrize("name", ["matmul", "fsdp"])
def test_without_a_gpu_it_says_so(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shapes = [] if name == "fsdp" else ["--mkn", "32,32,32"]
    assert main(["bench", name, *shapes]) == 2
    assert capsys.readouterr().err.startswith(
        "error: device 'cuda' is not there: no CUDA GPU here, use --device cpu"
    )
