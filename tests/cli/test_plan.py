"""`float8 plan` as users call it: what a step and its layers gain, modelled or measured."""

import copy
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import float8
from float8 import Float8LinearConfig, conversion_report, convert_to_high_precision
from float8.config import as_config
from float8.convert.speed import MEMORY, WAITS_BELOW_MS, layer_ms, why_slower
from float8_lab.bench.whole import Setup
from float8_lab.cli import plan
from float8_lab.cli.main import main
from float8_lab.cli.plan import (
    _short,
    config_code,
    conversion_code,
    filter_code,
    load_model,
    plan_layers,
    report_on,
)
from float8_lab.trainer.recipes import recipe_config
from support.experts import Experts
from support.rings import short

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
MINE = """
import functools

import torch
from torch import nn

from float8 import Float8LinearConfig
from float8_lab.models.llama import Llama
from float8_lab.models.presets import PRESETS


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

def unusual():
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(4096, 4096))
    return nn.Sequential(nn.LazyLinear(4096), computed, nn.Linear(4096, 4096))

def llama():
    model = Llama(PRESETS["llama3-8b"].model, 8192)
    model.tie_head()
    return model

def root():
    return nn.Linear(8192, 8192)

def modulated():
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Module() for _ in range(2))
    for block in model.blocks:
        block.norm1 = nn.ModuleDict({"linear": nn.Linear(8192, 8192)})
        block.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(8192, 8192))
        block.norm_out = nn.Linear(8192, 8192)
    return model

def joint():
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Module() for _ in range(2))
    model.blocks[0].attn = nn.ModuleDict({name: root() for name in ("to_q", "add_q_proj")})
    model.blocks[1].attn = nn.ModuleDict({"to_q": root()})
    return model

def CONFIG():
    return Float8LinearConfig()

nothing = nn.ReLU
none = dict
whole = nn.Linear(8, 8)
needs = lambda size: nn.Linear(size, size)
given = functools.wraps(needs)(lambda: needs(64))
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


def test_a_step_is_modelled_without_a_gpu(planned: Callable[..., str]) -> None:
    out = planned("--model", "llama3-8b", "--tokens", "8192", "-o", "x.json")
    results = json.loads(Path("x.json").read_text())
    modelled, step = results["modelled"], results["rows"][-1]
    told, error, memory, *call = results["verdict"]
    fits = "does not fit on 1 GPU, 119.7 of 79 GiB; on 2 (FSDP2, without activations) it pays: a s"
    assert told.startswith(f"{fits}tep 1.27x as fast, its ")
    assert error == "modelled (±5%)"
    assert memory == "parameters, gradients, AdamW: 59.8 of 79 GiB a GPU; activations come on top"
    assert call[0] == "attention found: 32 modules, Attention"
    judged = (
        "llama3-8b, tensorwise, 8192 tokens in sequences of 8192: modelled for 2 H100 (no --gpu"
    )
    answer = "\n".join([f"{judged} names another)", told, error, memory, *call])
    assert out.startswith(
        f"{answer}\n\n224 of 225 linear layers run in float8, 93.0% of all matmul"
    )
    assert re.search(
        r"layers.0-31.attention.key +\[1024, 4096\] +float8: modelled 1.06x of bf16\n", out
    )
    chosen = 'chosen for H100 (gpu="H100"): modelled as tensorwise at 8192 tokens per forward, cas'
    assert f"{chosen}ts shared by 2 ranks\n" in out
    assert re.search(r"output +\[128256, 4096\] +skipped: the head", out)
    assert out.endswith(f"results: x.json\n{told}\n")
    assert "measured" not in out
    assert (len(results["report"]["layers"]), results["settings"]["for"]) == (225, "H100")
    assert (modelled["gib_of_gpu"], modelled["error"]) == (79, 0.05)
    assert modelled["gib"] == pytest.approx(119.66 / 2, abs=0.01)
    assert (modelled["gpus"], modelled["unmeasured"], len(modelled["gains"])) == (2, [], 225)
    assert modelled["gains"]["layers.0.attention.key"] == pytest.approx(1.065, abs=0.005)
    assert (step["what"], step["speedup"]) == ("step", pytest.approx(modelled["speedup"]))
    # Made on the CPU, since it needs values.
    assert "1 of 1 linear" in planned("--gpu", "NVIDIA H100 80GB HBM3", "mine_to_plan:on_cpu")
    tiny = planned("--model", "tiny")
    assert "\nno gain: no layer is faster in float8; more --tokens" in tiny
    assert "convert_to_float8_training" not in tiny
    assert "\nno gain: " in planned("--gpu", "H200", "mine_to_plan:given")
    mine = planned("--gpu", "H200", "mine_to_plan:make")
    assert "mine_to_plan:make, tensorwise, 8192 tokens in sequences of 8192: modelled" in mine
    assert "1 of 3 linear layers run in float8, 1.5% of all matmul weights" in mine


def test_the_page_shows_what_is_printed(planned: Callable[..., str]) -> None:
    page = (RESULTS.parents[1] / "docs" / "measuring.md").read_text()
    (shown,) = re.findall(r"^```text\n(llama3-8b, .*?)^```$", page, re.MULTILINE | re.DOTALL)
    out = planned("--gpu", "H100", "--model", "llama3-8b", "--data-parallel", "8")
    printed = out.splitlines()
    assert [line for line in printed if line != line.rstrip()] == []
    table = next(i for i, line in enumerate(printed) if line.startswith("a step of training, "))
    del printed[printed.index("") + 1 : table]  # the report
    assert shown.splitlines() == printed


def test_layers_are_measured_where_a_device_is_named_and_a_filter_is_given_out(
    planned: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--model", "tiny", "--tokens", "32", "--device", "cpu"
    out = planned(*words)
    assert "tiny, tensorwise, 32 tokens: measured for " in out
    assert re.search(
        r"32 +96 +288 +4 +gate up +[\d.]+ +[\d.]+ +\d\.\d\d (convert|leave: slower)", out
    )
    assert re.search(r"measured: \d\.\d\dx of all linear layers", out)
    assert "modelled" not in out
    for ms, told in ((0.5, True), (2.0, False)):
        monkeypatch.setattr(plan, "measure_linear", lambda *_, ms=ms, **__: (1.0, ms))
        assert ("\nmodule_filter_fn=lambda mod, fqn: re.sub(" in planned(*words)) == told


def test_unusual_models_have_an_answer(planned: Callable[..., str]) -> None:
    assert re.search(r"\nit pays: a step 1\.\d\dx as fast", planned("mine_to_plan:unusual"))
    nothing = planned("mine_to_plan:nothing")
    assert "\nno gain: no layer is faster in float8; the report says why\n" in nothing
    assert "\nno attention found: if there is any, a step takes longer and gains less\n" in nothing
    # All tokens, not one of each sequence as of a classifier.
    high = layer_ms("H100", "bf16", 8192, 8192, 8192)
    assert re.search(rf"linear layers +{high:.3f} ", planned("mine_to_plan:root"))


def test_modulations_see_one_row_of_each_sequence(planned: Callable[..., str]) -> None:
    out = planned("mine_to_plan:modulated", "--sequence", "1024")
    few, all_tokens = (layer_ms("H100", "bf16", rows, 8192, 8192) for rows in (8, 8192))
    assert re.search(rf"linear layers +{4 * few + 2 * all_tokens:.2f}", out)
    for name in ("norm1.linear", "adaLN_modulation.N"):  # once for both blocks
        assert out.count(f"\nblocks.N.{name}: judged at all tokens, timed at one of each") == 1
    assert "norm_out: judged" not in out


def test_two_streams_of_a_block_share_the_tokens(planned: Callable[..., str]) -> None:
    half, all_tokens = (layer_ms("H100", "bf16", rows, 8192, 8192) for rows in (4096, 8192))
    assert re.search(rf"linear layers +{2 * half + all_tokens:.2f}", planned("mine_to_plan:joint"))


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
        ("mine_to_plan:needs", "got .* expected a function without arg.*: missing a required"),
        ("mine_to_plan:whole", "got 'mine_to_plan:whole', expected a function w.*: it is a model"),
        ("mine_to_plan:make --model 1b", "got 'mine_to_plan:make' and --model 1b"),
        ("--device cuda", "device 'cuda' is not there: no CUDA GPU here"),
        ("--gpu H1000", "gpu: got 'H1000', expected one that is modelled, of 'H100', 'H200'"),
        ("--gpu H100,H200", "gpu: got 'H100,H200', expected one that is modelled, of 'H100', 'H"),
        ("--gpu H100 --device cpu", "--device is where to measure"),
        ("--tokens 8192 --sequence 5000", "sequence: got 5000, expected a divisor of --tokens 8"),
        ("--expert-parallel 2", "expert-parallel: got 2, expected a divisor of --data-parallel"),
        ("--recipe tensorwise,rowwise", "recipe: got 'tensorwise,rowwise', expected one of"),
        (
            "--recipe mxfp8",
            "config: got mxfp8, but .* exponents; add .emulate to the recipe to com",
        ),
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
    report = report_on(model(), Float8LinearConfig(), Setup(8192, 8192), "H100")
    for times, waits, fate in (
        ((2.0, 1.0), True, "convert"),
        ((1.0, 2.0), True, "leave: slower"),
        ((0.2, 0.1), True, "leave: waits for the CPU"),
        ((0.2, 0.1), False, "convert"),
    ):
        rows = plan_layers(report, 8192, lambda shape, times=times: times, waits)
        found = [(row["layers"], row["count"], row["M"], row["K"], row["fate"]) for row in rows]
        assert found == [
            ("a b", 2, 8192, 4096, fate),
            ("small", 1, 8192, 4096, "leave: loses"),
            ("output", 1, 8192, 4096, "leave: the head"),
        ]
    for fqn, shortened in (
        ("layers.0.q_proj.base_layer", "q_proj"),
        ("q_proj.lora_A.default", "lora_A"),
        ("experts.3", "experts.N"),
        ("base_layer", "base_layer"),
    ):
        assert _short(fqn) == shortened


def test_the_ranks_that_share_casts_of_experts_are_told_apart() -> None:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    with torch.device("meta"):
        experts = nn.ModuleList([nn.Linear(4096, 4096), Experts()])
    for made, split, told in (
        (experts, 1, "casts shared by 8 ranks"),
        (experts, 4, "casts shared by 8 ranks (experts' by 2)"),
        (model(), 4, "casts shared by 8 ranks"),
    ):
        (chosen,) = report_on(made, config, Setup(8192, 8192, 8, split), "H100").chosen_for
        assert chosen.endswith(f" at 8192 tokens per forward, {told}")
        convert_to_high_precision(made)  # for the next turn


@pytest.mark.parametrize("gpu", MEMORY)
def test_layers_that_were_measured_to_gain_are_large_enough(gpu: str) -> None:
    rows = json.loads((RESULTS / "h100-linear-eager.json").read_text())["rows"]
    gaining = [row for row in rows if row["K"] is not None and row["speedup"] > 1]
    assert len(gaining) == 24
    for row in gaining:
        layer = nn.Linear(row["K"], row["N"], device="meta")
        config = Float8LinearConfig.from_recipe_name(row["recipe"])
        assert why_slower(layer, config, row["M"], 1, gpu, waits=True) is None


def test_what_ranks_gather_makes_no_layer_wait_less_for_the_cpu() -> None:
    layer = nn.Linear(4096, 14336, device="meta")
    reason = why_slower(layer, Float8LinearConfig(), 400, 8, "H200", waits=True)
    assert str(reason).startswith("waits for the CPU: 0.20 ms of H200 in bf16")


def test_layers_that_wait_for_the_cpu_stay_but_in_cuda_graphs(planned: Callable[..., str]) -> None:
    """With graphs the feed-forward gains: a step was measured at 1.02."""
    for more, converted in (([], 0), (["--cuda-graphs"], 36)):
        out = planned("--model", "150m", "--gpu", "H200", *more)
        assert f"{converted} of 85 linear layers" in out
        assert ("skipped: waits for the CPU" in out) == (not more)
        assert ("or --cuda-graphs, may change that" in out) == (not more)


EXPECTED = "the default filter expects that "


@pytest.mark.parametrize(
    ("model", "tokens", "ranks", "expected"),
    [("llama3-1b", "2048", "2", ""), ("llama3-70b", "512", "8", EXPECTED)],
)
def test_where_gathers_take_longer_than_the_cpu_only_the_filter_says_that_it_decides(
    model: str, tokens: str, ranks: str, expected: str, planned: Callable[..., str]
) -> None:
    out = planned("--model", model, "--tokens", tokens, "--data-parallel", ranks, "--gpu", "H200")
    hint = "more --tokens, or --cuda-graphs, may change that"
    assert f"\nno gain: {expected}the host decides; {hint}\n" in out


def test_the_head_is_planned_as_it_was_measured(planned: Callable[..., str]) -> None:
    gains = []
    for more in ([], ["--head"]):
        out = planned("--model", "llama3-1b", "--gpu", "H100", *more, "-o", "x.json")
        assert ('gpu="H100", head=True)' in out) == bool(more)
        assert bool(re.search(r"output +\[128256, 2048\] +float8: modelled", out)) == bool(more)
        gains.append(json.loads(Path("x.json").read_text())["modelled"]["speedup"])
    steps = json.loads((RESULTS / "h100-head.json").read_text())["steps"]
    ms = {row["recipe"]: row["ms"] for row in steps}
    measured = ms["tensorwise"] / ms["tensorwise+head"]
    assert gains[1] / gains[0] == pytest.approx(measured, rel=0.02)


def test_the_limit_of_the_cpu_is_the_same_modelled_and_measured() -> None:
    for row in json.loads((RESULTS / "h200-smallest-layers.json").read_text())["rows"]:
        if row["recipe"] == "bf16" and row["mode"] == "eager":
            M, K, N = row["M"], row["K"], row["N"]
            waits = M * K * N < 34e9
            assert (row["ms"] < WAITS_BELOW_MS) == waits
            if not 26e9 < M * K * N < 34e9:
                assert (layer_ms("H200", "bf16", M, K, N) < WAITS_BELOW_MS) == waits


def test_a_filter_is_given_out_as_code() -> None:
    with torch.device("meta"):
        block = nn.ModuleDict({"wide": nn.Linear(512, 1024), "narrow": nn.Linear(512, 256)})
        other = nn.ModuleDict({"wide": nn.Linear(512, 256), "lm_head": nn.Linear(512, 1024)})
        root = nn.Linear(512, 1024)
    for code, model in (
        (r"""re.sub(r"\d+", "N", fqn) in ['N.wide']""", nn.ModuleList([block, block])),
        ("fqn in ['0.wide']", nn.ModuleList([block, other])),  # blocks differ
        ("fqn in ['']", root),
    ):
        report = report_on(copy.deepcopy(model), Float8LinearConfig(), Setup(8192, 8192), None)
        wide = {x.fqn for x in report.converted if x.out_features == 1024}
        found = filter_code(report, lambda x, wide=wide: x.fqn in wide)
        assert found == f"lambda mod, fqn: {code}"
        takes = eval(found, {"re": re})
        assert wide == {x.fqn for x in report.layers if takes(None, x.fqn.removeprefix("(root)"))}


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise+held", "tensorwise+fast_accum"])
def test_a_configuration_is_given_out_as_code(recipe: str) -> None:
    for gathers in (False, True):
        config = dataclasses.replace(recipe_config(recipe), enable_fsdp_float8_all_gather=gathers)
        names = {"replace": dataclasses.replace, **vars(float8)}
        code = eval(config_code(config, recipe), names)
        assert as_config(code) == config
        lines = conversion_code(config, recipe, "module_filter_fn=all_linears")
        exec("\n".join(lines), found := {"model": model()})  # with its imports
        assert {layer.config for layer in found["model"].children()} == {config}
    assert config_code(recipe_config("rowwise"), "rowwise") == '"rowwise"'


@pytest.mark.parametrize(
    ("recipe", "tokens", "ranks", "converted", "verdict"),
    short(
        {1},
        [
            ("rowwise", 4096, 8, 160, "it pays: .*x$"),
            ("tensorwise", 4096, 1, 224, "does not fit on 1 GPU, .*; on 2 .* it pays: .*x$"),
            ("mine_to_plan:CONFIG+held", 8192, 2, 224, "it pays: .*x$"),
            ("rowwise_with_gw_hp", 768, 8, 0, "no gain: no layer is faster in float8"),
        ],
    ),
)
def test_what_ranks_gather_decides_and_the_printed_call_converts_what_the_report_says(
    planned: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    tokens: int,
    ranks: int,
    converted: int,
    verdict: str,
) -> None:
    """With 768 tokens ranks wait for the CPU.

    One recipe has two casts of the weight, so it cannot gather them.
    """
    words = "--model", "llama3-8b", "--tokens", str(tokens), "--data-parallel", str(ranks)
    out = planned(*words, "--recipe", recipe, "-o", "x.json")
    found = json.loads(Path("x.json").read_text())
    layers, (first, *rest) = found["report"]["layers"], found["verdict"]
    assert sum(layer["scaling"] is not None for layer in layers) == converted
    assert re.match(verdict, first)
    # A configuration of one's own says it itself; one recipe cannot.
    gathers = ":" not in recipe and recipe != "rowwise_with_gw_hp"
    shared = f", casts shared by {found['modelled']['gpus']} ranks\n"
    assert (shared in out) == bool(gathers)
    if ranks == 8 and converted:  # which nobody measured
        assert "±5%" not in out
        assert rest[0].startswith("modelled (error not known: nothing was measured on more than 4 ")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: found["modelled"]["gpus"])
    calls = re.findall(r"(?:^(?:from|import) .*\n)+^config = .*\nconvert_to_.*$", out, re.MULTILINE)
    assert len(calls) == bool(converted)
    for call in calls:  # all that it needs is a model
        exec(call, names := {"model": load_model("mine_to_plan:llama")})
        assert conversion_report(names["model"]).to_dict()["layers"] == layers
