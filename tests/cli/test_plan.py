"""`float8 plan` as users call it: which layers gain, and the judges that say so."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from float8 import Float8LinearConfig, Float8LinearRecipeName
from float8.convert import smallest
from float8.convert.measure import LinearTimes, measure_linear
from float8.convert.smallest import SMALLEST, Smallest, too_small
from float8_lab.cli.main import main
from float8_lab.cli.plan import plan_conversion

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None is seen; an empty working folder, and one thread for tiny tensors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("no_gpu")
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


@pytest.mark.usefixtures("no_gpu")
def test_few_tokens_leave_all_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "150m", "--tokens", "64", "--gpu", "H200"]) == 0
    out = capsys.readouterr().out
    assert "judged by size for H200" in out
    assert "convert" not in out
    assert "leave: tokens=64 is less than" in out


@pytest.mark.usefixtures("no_gpu")
def test_each_recipe_is_judged_by_its_own_limits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"rowwise": Smallest(1, 1, 1e15)}
    monkeypatch.setattr(smallest, "SMALLEST", {"H100": limits})
    assert main(["plan", "--model", "150m", "--recipe", "rowwise", "--by-size"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "150m, rowwise, 8192 tokens: judged by size for H100" in out
    assert "is less than 1e+15" in out


@pytest.mark.usefixtures("no_gpu")
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
@pytest.mark.usefixtures("no_gpu")
def test_user_errors_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


# ---------------------------------------------------------------- layers and judges


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "a": nn.Linear(4096, 4096),
                "b": nn.Linear(4096, 4096),
                "small": nn.Linear(4096, 64),
                "output": nn.Linear(4096, 4096),
            }
        )


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"tensorwise": Smallest(1024, 640, 32e9)}
    monkeypatch.setattr(smallest, "SMALLEST", {"H100": limits})


@pytest.mark.usefixtures("limits")
def test_layers_are_grouped_by_shape_and_fate() -> None:
    judge = lambda K, N: too_small("H100", "tensorwise", 8192, K, N)  # noqa: E731
    rows = plan_conversion(model(), 8192, judge)
    found = [(row["layers"], row["count"], row["M"], row["K"], row["fate"]) for row in rows]
    assert found == [
        ("a b", 2, 8192, 4096, "convert"),
        ("small", 1, 8192, 4096, "leave: N=64 is less than 640"),
        ("output", 1, 8192, 4096, "leave: output head"),
    ]


@pytest.mark.parametrize("gpu", SMALLEST)
def test_layers_that_were_measured_to_gain_are_large_enough(gpu: str) -> None:
    rows = json.loads((RESULTS / "h100-linear-eager.json").read_text())["rows"]
    gaining = [row for row in rows if row["K"] is not None and row["speedup"] > 1]
    assert len(gaining) == 24
    for row in gaining:
        assert too_small(gpu, row["recipe"], row["M"], row["K"], row["N"]) is None


@pytest.mark.parametrize("recipe", [recipe.value for recipe in Float8LinearRecipeName])
def test_faster_memory_makes_smaller_layers_gain(recipe: str) -> None:
    slow, fast = (SMALLEST[gpu][recipe] for gpu in ("H100", "H200"))
    assert all(a >= b for a, b in zip(slow, fast, strict=True))


@pytest.mark.parametrize(
    ("float8_ms", "fate"), [(0.5, "convert"), (1.0, "convert"), (1.1, "leave: slower")]
)
def test_a_measured_layer_says_whether_it_is_slower(float8_ms: float, fate: str) -> None:
    rows = plan_conversion(model(), 100, lambda K, N: LinearTimes(1.0, float8_ms))
    assert (rows[0]["fate"], rows[0]["bf16_ms"], rows[0]["float8_ms"]) == (fate, 1.0, float8_ms)
    assert rows[0]["speedup"] == 1 / float8_ms
    assert rows[-1]["fate"].startswith("leave")


@pytest.mark.gpu
def test_a_large_layer_gains_on_a_gpu() -> None:
    times = measure_linear(8192, 4096, 4096, torch.device("cuda", 0), Float8LinearConfig())
    assert times.float8_ms < times.bf16_ms
