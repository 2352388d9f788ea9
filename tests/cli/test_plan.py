"""`float8 plan` as users call it: which layers gain, by size or measured."""

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from float8 import Float8LinearConfig
from float8.convert.speed import SMALLEST, WAITS_BELOW, too_small
from float8_lab.bench.linear import LinearTimes
from float8_lab.cli import plan
from float8_lab.cli.main import main
from float8_lab.cli.plan import (
    WAITS_BELOW_MS,
    _short,
    filter_found,
    plan_layers,
    report_on,
)

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
MINE = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 16384, 16384))

def make():
    narrow = nn.Linear(4096, 64), nn.Linear(4096, 8)
    return nn.Sequential(nn.Linear(16384, 16384), *narrow, Experts())

def values():
    return nn.Linear(int(torch.full((1,), 2048.0).item()), 2048)

def on_cpu():
    with torch.device("cpu"):
        return values()

none = dict
"""


@pytest.fixture(autouse=True)
def mine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of one's own, on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", [*sys.path])  # what it finds there it does not find later
    Path("mine_to_plan.py").write_text(MINE)
    monkeypatch.delitem(sys.modules, "mine_to_plan", raising=False)


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*words: str) -> str:
        assert main(["plan", *words]) == 0
        return capsys.readouterr().out

    return call


def test_layers_are_judged_by_size_without_a_gpu(planned: Callable[..., str]) -> None:
    out = planned("--model", "llama3-8b", "--tokens", "8192", "-o", "x.json")
    judged = "llama3-8b, tensorwise, 8192 tokens: judged by size for H100 (no --gpu names another)"
    assert out.startswith(judged)
    assert "224 of 225 linear layers run in float8, 93.0% of all matmul weights" in out
    assert 'chosen for H100 (gpu="H100"): limits of tensorwise at 8192 tokens per forward' in out
    assert re.search(r"output +\[128256, 4096\] +skipped: the head", out)
    assert " ms" not in out  # Nothing was measured.
    assert "results: x.json\nGPU time of layers one by one: large ones gain more when" in out
    results = json.loads(Path("x.json").read_text())
    assert (len(results["rows"]), results["settings"]["for"]) == (225, "H100")
    # Made on the CPU, since it needs values.
    assert "1 of 1 linear" in planned("--gpu", "NVIDIA H100 80GB HBM3", "mine_to_plan:on_cpu")
    assert "it does not pay: no layer gains; more --tokens" in planned("--model", "tiny")
    mine = planned("--gpu", "H200", "mine_to_plan:make")
    assert "mine_to_plan:make, tensorwise, 8192 tokens: judged by size for H200" in mine
    assert "1 of 3 linear layers run in float8, 1.5% of all matmul weights" in mine


def test_layers_are_measured_where_a_device_is_named(planned: Callable[..., str]) -> None:
    out = planned("--model", "tiny", "--tokens", "32", "--device", "cpu")
    assert "tiny, tensorwise, 32 tokens: measured for " in out
    assert re.search(
        r"32 +128 +384 +6 +gate up +[\d.]+ +[\d.]+ +\d\.\d\d (convert|leave: slower)", out
    )
    assert re.search(r"all linear layers: \d\.\d\dx of bf16", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mine_to_plan", "got 'mine_to_plan', expected module:name of a func"),
        ("mine_to_plan.py", "got 'mine_to_plan.py', expected mine_to_plan:NAME, with"),
        ("a/m.py:make", "got 'a/m.py:make', expected m:make, without .py, called in the f"),
        ("mine_to_plan:other", "'mine_to_plan:other' cannot be imported in "),
        ("nowhere:make", r"'nowhere:make' cannot.*; call it in the folder of the module\n$"),
        ("needs_more:make", r"'needs_more:make' cannot.*; install no_such_package, which it imp"),
        ("mine_to_plan:values", "'mine_to_plan:values' fails on the meta device: "),
        ("mine_to_plan:none", "'mine_to_plan:none' returned dict, expected nn.Module"),
        ("mine_to_plan:make --model 1b", "got 'mine_to_plan:make' and --model 1b"),
        ("--device cuda", "device 'cuda' is not there: no CUDA GPU here"),
        ("--gpu H1000", "gpu: got 'H1000', expected one of H100, H200"),
        ("--gpu abacus", "gpu: got 'abacus', expected one of H100, H200"),
        ("--gpu H100 --device cpu", "--device is where to measure"),
    ],
)
def test_user_errors_are_one_line(words: str, message: str, refused: Callable[..., str]) -> None:
    Path("needs_more.py").write_text("import no_such_package.of_mine")
    assert re.match(f"(model: )?{message}", refused("plan", *words.split()))


def model() -> nn.Module:
    sizes = {"a": 4096, "b": 4096, "small": 64, "output": 4096}
    with torch.device("meta"):
        return nn.ModuleDict({name: nn.Linear(4096, N) for name, N in sizes.items()})


def test_layers_are_grouped_by_shape_and_fate() -> None:
    report = report_on(model(), Float8LinearConfig(), 8192, "H100", False)
    for times, waits, fate in (
        (LinearTimes(2.0, 1.0), True, "convert"),
        (LinearTimes(1.0, 2.0), True, "leave: slower"),
        (LinearTimes(0.2, 0.1), True, "leave: waits for the CPU"),
        (LinearTimes(0.2, 0.1), False, "convert"),
    ):
        rows = plan_layers(report, 8192, lambda shape, times=times: times, waits)
        found = [(row["layers"], row["count"], row["M"], row["K"], row["fate"]) for row in rows]
        assert found == [
            ("a b", 2, 8192, 4096, fate),
            ("small", 1, 8192, 4096, "leave: N=64 is less than 1024"),
            ("output", 1, 8192, 4096, "leave: the head"),
        ]
    for fqn, short in (
        ("layers.0.q_proj.base_layer", "q_proj"),
        ("q_proj.lora_A.default", "lora_A"),
        ("experts.3", "experts.N"),
        ("base_layer", "base_layer"),
    ):
        assert _short(fqn) == short


@pytest.mark.parametrize("gpu", SMALLEST)
def test_layers_that_were_measured_to_gain_are_large_enough(gpu: str) -> None:
    rows = json.loads((RESULTS / "h100-linear-eager.json").read_text())["rows"]
    gaining = [row for row in rows if row["K"] is not None and row["speedup"] > 1]
    assert len(gaining) == 24
    for row in gaining:
        assert too_small(gpu, row["recipe"], row["M"], row["K"], row["N"]) is None


def test_layers_that_wait_for_the_cpu_stay_but_in_cuda_graphs(planned: Callable[..., str]) -> None:
    for more, converted in (([], 0), (["--cuda-graphs"], 36)):
        out = planned("--model", "150m", "--gpu", "H200", *more)
        assert f"{converted} of 85 linear layers" in out
        assert ("skipped: waits for the CPU" in out) == (not more)
        assert ("or --cuda-graphs, may change that" in out) == (not more)


def test_both_limits_of_the_cpu_are_those_of_one_layer() -> None:
    times = [
        (row["M"] * row["K"] * row["N"] >= WAITS_BELOW, row["ms"])
        for row in json.loads((RESULTS / "h200-smallest-layers.json").read_text())["rows"]
        if row["recipe"] == "bf16" and row["mode"] == "eager" and row["K"] is not None
    ]
    assert min(ms for large, ms in times if large) >= WAITS_BELOW_MS
    assert max(ms for large, ms in times if not large) < WAITS_BELOW_MS


def test_what_was_measured_is_given_out_as_a_filter(
    planned: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        block = nn.ModuleDict({"wide": nn.Linear(512, 1024), "narrow": nn.Linear(512, 256)})
        other = nn.ModuleDict({"wide": nn.Linear(512, 256), "lm_head": nn.Linear(512, 1024)})
        root = nn.Linear(512, 1024)
    for model, found in (
        (nn.ModuleList([block, block]), r"""re.sub(r"\d+", "N", fqn) in ['N.wide']"""),
        (nn.ModuleList([block, other]), "fqn in ['0.wide']"),  # blocks differ
        (root, r"""re.sub(r"\d+", "N", fqn) in ['']"""),
    ):
        report = report_on(copy.deepcopy(model), Float8LinearConfig(), 8192, None, False)
        rows = plan_layers(
            report, 8192, lambda shape: LinearTimes(1.0, 2.0 if shape.N == 256 else 0.5), True
        )
        code = filter_found(report, rows)
        assert code == f"lambda mod, fqn: {found}"
        takes = eval(code, {"re": re})
        gaining = [x for x in report.layers if x.out_features == 1024 and "head" not in x.fqn]
        assert [x for x in report.layers if takes(None, x.fqn.removeprefix("(root)"))] == gaining
    for ms, told in ((0.5, True), (2.0, False)):
        monkeypatch.setattr(plan, "measure_linear", lambda *_, ms=ms, **__: LinearTimes(1.0, ms))
        out = planned("--model", "tiny", "--tokens", "32", "--device", "cpu")
        assert ("\nmodule_filter_fn=lambda mod, fqn: re.sub(" in out) == told
