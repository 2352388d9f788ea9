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
    plan_conversion,
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


def test_what_it_says(planned: Callable[..., str]) -> None:
    out = planned("--model", "llama3-8b", "--tokens", "8192", "-o", "x.json")
    judged = "llama3-8b, tensorwise, 8192 tokens: judged by size for H100 (no --gpu names another)"
    assert out.startswith(judged)
    assert re.search(r"4096 +14336 +64 +gate up +convert", out)
    assert re.search(r"4096 +128256 +1 +output +leave: the head", out)
    assert " ms" not in out  # Nothing was measured.
    assert "float8: 224 of 225 linear layers, 93.0% of all matmul weights" in out
    assert 'chosen for H100 (gpu="H100"): limits of tensorwise at 8192 tokens per forward' in out
    assert "GPU time of layers one by one: large ones gain more when compiled,\nsmall" in out
    assert sum(row["count"] for row in json.loads(Path("x.json").read_text())["rows"]) == 7 * 32 + 1
    # Made on the CPU, since it needs values.
    on_cpu = planned("--gpu", "NVIDIA H100 80GB HBM3", "mine_to_plan:on_cpu")
    assert "float8: 1 of 1 linear layers, 100.0% of all matmul weights" in on_cpu
    small = planned("mine_to_plan:make", "--tokens", "8")
    assert "no linear layer gains; more --tokens" in small
    measured = planned("--model", "tiny", "--tokens", "32", "--device", "cpu")
    assert "tiny, tensorwise, 32 tokens: measured for " in measured
    assert re.search(r"all linear layers: \d\.\d\dx of bf16", measured)


def test_a_model_of_ones_own_without_its_gpu_and_memory(planned: Callable[..., str]) -> None:
    out = planned("--gpu", "H200", "mine_to_plan:make", "-o", "x.json")
    assert "mine_to_plan:make, tensorwise, 8192 tokens: judged by size for H200" in out
    assert re.search(r"16384 16384 +1 N +convert", out)
    assert re.search(r"4096 +64 +1 N +leave: N=64 is less than 768", out)
    assert re.search(r"4096 +8 +1 N +leave: N=8 is less than 16, as a router's", out)
    assert "not judged, grouped_linear or not: 1 x weight [64, 16384, 16384] of Experts" in out
    assert "float8: 1 of 3 linear layers, 1.5% of all matmul weights" in out
    assert json.loads(Path("x.json").read_text())["settings"]["for"] == "H200"


def test_experts_are_shown_beside_layers(planned: Callable[..., str]) -> None:
    pytest.importorskip("transformers")
    code = "import transformers as tf\n"
    for name, heads in (("wide", 4096), ("narrow", 256)):
        sizes = f"hidden_size={heads}, intermediate_size={4 * heads}, num_hidden_layers=1"
        code += f"def {name}(): return tf.MixtralForCausalLM(tf.MixtralConfig({sizes}))\n"
    Path("mine_to_plan.py").write_text(code)
    out = planned("--gpu", "H100", "mine_to_plan:wide")
    assert re.search(r"8 +4096 +32768 +1 +gate_up_proj +convert", out)
    assert re.search(r"4 of 5 linear layers and 2 of 2 weights of experts, 9\d\.\d% of all", out)
    out = planned("--gpu", "H100", "mine_to_plan:narrow")
    assert re.search(r"8 +1024 +256 +1 +down_proj +leave: 0\.\d\dx of bf16 on paper for H100", out)
    assert "tokens for each expert (8192 tokens, 2 of 8 experts each)" in out
    assert "0 of 2 weights of experts, 0.0% of all matmul weights" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mine_to_plan", "got 'mine_to_plan', expected module:function"),
        ("mine_to_plan.py", "got 'mine_to_plan.py', expected mine_to_plan:FUNCTION, with"),
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
    rows = plan_conversion(report, 8192, None)
    found = [(row["layers"], row["count"], row["M"], row["K"], row["fate"]) for row in rows]
    assert found == [
        ("a b", 2, 8192, 4096, "convert"),
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


@pytest.mark.parametrize(("more", "converted"), [([], 0), (["--cuda-graphs"], 36)])
def test_layers_that_wait_for_the_cpu_stay_but_in_cuda_graphs(
    more: list[str], converted: int, planned: Callable[..., str]
) -> None:
    out = planned("--model", "150m", "--gpu", "H200", *more)
    assert f"float8: {converted} of 85 linear layers" in out
    assert ("leave: waits for the CPU" in out) == (not more)
    assert ("or --cuda-graphs, may change that" in out) == (not more)
    report = report_on(model(), Float8LinearConfig(), 8192, "H100", False)
    for waits in (False, True):
        rows = plan_conversion(report, 8192, lambda shape: LinearTimes(0.2, 0.1), waits)
        assert ("leave: waits for the CPU" in {row["fate"] for row in rows}) == waits


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
        rows = plan_conversion(
            report, 8192, lambda shape: LinearTimes(1.0, 2.0 if shape.N == 256 else 0.5)
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
