"""Training under FSDP2 as `float8 bench fsdp` measures it, on two CPU ranks; and how ranks end."""

import json
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from float8.convert.measure import WrongResultError
from float8_lab.bench import variants as variants_module
from float8_lab.bench.block import Stack, StackSize
from float8_lab.bench.fsdp import ShardedStep, bench_on_ranks, free_memory, same_bits
from float8_lab.bench.step import check
from float8_lab.bench.variants import Variant, make_variants
from float8_lab.ranks import start_ranks
from support.limits import HANGS

FAILING = str(Path(__file__).parents[1] / "support" / "rank_that_fails.py")
TINY = StackSize("tiny", 1, 32)
RECIPES = ["tensorwise", "delayed"]


SMALL = ["--model", "tiny", "--blocks", "1", "--seq-len", "32", "--mode", "eager"]
SMALL += ["--device", "cpu", "--rounds", "1"]


def fsdp(here: Path, *launched_by: str, more: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """`float8 bench fsdp` as a process: exit code, stdout, stderr."""
    words = [sys.executable, *launched_by, "bench", "fsdp", *SMALL, *more]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": HANGS}
    done = subprocess.run(words, cwd=here, check=False, **options)
    return done.returncode, done.stdout, done.stderr


def test_the_command(tmp_path: Path) -> None:
    more = ("--ranks", "2", "-o", "x.json")
    code, out, err = fsdp(tmp_path, "-m", "float8_lab.cli.main", more=more)
    assert code == 0, err
    assert "Traceback" not in err
    assert out.count("1 tiny block(s), 1 x 32 tokens each, under FSDP2 on 2 rank(s)") == 1
    assert out.count("  11/11") == 1
    results = json.loads((tmp_path / "x.json").read_text())
    assert {"device", "torch", "git_commit", "command"} <= results["environment"].keys()
    assert results["environment"]["command"].startswith("float8 bench fsdp --model tiny")
    assert results["settings"]["ranks"] == 2
    rows = {(row["recipe"], row["gather"]): row for row in results["rows"]}
    assert list(rows) == [
        ("bf16", "bf16"),
        ("tensorwise", "bf16"),
        ("tensorwise", "float8"),
        ("delayed", "bf16"),
        ("delayed", "float8"),
    ]

    parameters = dict(Stack(TINY).named_parameters())
    linear = sum(p.numel() for p in parameters.values() if p.ndim == 2)
    norms = sum(p.numel() for p in parameters.values() if p.ndim == 1)
    for (recipe, gather), row in rows.items():
        traffic = row["traffic"]
        size = 1 if gather == "float8" else 2
        assert traffic["gathered"] == 2 * (size * linear + 2 * norms)  # forward and backward
        assert traffic["reduce_scattered"] == 2 * (linear + norms)
        # Attached to the optimizer: of the sync, and for the scales of all weights.
        assert traffic["all_reduces"] == (recipe == "delayed") + (gather == "float8")
        assert traffic["other"] == 0
        assert row["tokens_per_s"] == pytest.approx(2 * 32 / row["ms"] * 1e3, rel=1e-3)
        assert row["same_bits"] == (1.0 if gather == "float8" else None)
        assert row["exposed_ms"] is None
        assert row["peak_gib"] is None  # a CPU


def test_each_gather_is_a_variant_and_torchao_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    precomputed = []
    torchao = ModuleType("torchao.float8")
    torchao.Float8LinearConfig = lambda enable_fsdp_float8_all_gather: None
    torchao.convert_to_float8_training = lambda model, config: model
    torchao.precompute_float8_dynamic_scale_for_fsdp = precomputed.append
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", torchao)
    monkeypatch.setattr(variants_module, "peer_version", lambda peer: "1.0")
    variants = make_variants(RECIPES, ["compiled"], ["torchao"], sharded=True)
    assert [variant.name for variant in variants] == [
        "bf16, compiled, bf16 gather",
        "tensorwise, compiled, bf16 gather",
        "tensorwise, compiled, float8 gather",
        "delayed, compiled, bf16 gather",
        "delayed, compiled, float8 gather",
        "torchao tensorwise, compiled, float8 gather",
    ]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    variants[-1].attach(model, optimizer)
    optimizer.step()
    assert precomputed == [model]


def test_a_variant_leaves_no_memory_behind(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        for variant in make_variants(RECIPES, ["eager"], sharded=True):
            step = ShardedStep(variant, TINY, torch.device("cpu"))
            step()
            weights = [weakref.ref(p) for p in step.model.parameters()]
            del step
            free_memory(torch.device("cpu"))
            assert all(weight() is None for weight in weights), variant.name
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("good_passes", [0, 1])
def test_of_a_peer_that_fails_only_the_reason_is_left(good_passes: int) -> None:
    made: list[str] = []

    def make(variant: Variant, *_: object) -> Any:
        made.append(variant.recipe)
        if variant.recipe == "peer" and made.count("peer") > good_passes:
            raise RuntimeError("no such kernel")
        return SimpleNamespace(
            check=lambda references: {"sqnr_db": 30.0},
            sent=dict,
            times=lambda rounds: ([10.0 * len(made)] * rounds, None),
            exposed_ms=lambda: None,
            tokens=100,
        )

    variants = [Variant("bf16", "eager"), Variant("peer", "eager")]
    *_, (bf16, peer) = bench_on_ranks(make, variants, TINY, torch.device("cpu"), 3)
    names = {"mode": "eager", "gather": None}
    assert peer == {"recipe": "peer", **names, "left_out": "RuntimeError: no such kernel"}
    assert bf16["ms"] == 20.0  # of passes with 10 and 30
    assert bf16["tokens_per_s"] == 5000
    assert bf16["speedup"] == 1


def test_a_wrong_gradient_ends_it(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        right = {"a": torch.randn(4, 4).bfloat16(), "b": torch.ones(2).bfloat16()}
        assert check("fsdp x:", right, right, 10) == float("inf")
        assert same_bits(right, right) == 1
        off = {"a": right["a"] * 1.125, "b": right["b"]}
        assert check("fsdp x:", right, off, 10) == pytest.approx(18.06, abs=0.1)
        assert same_bits(right, off) == 0.5
        for wrong in (torch.zeros(4, 4), torch.full((4, 4), torch.nan)):
            with pytest.raises(WrongResultError, match=r"fsdp x: a: SQNR .* at least"):
                check("fsdp x:", right, {**right, "a": wrong.bfloat16()}, 10)
    finally:
        dist.destroy_process_group()


def test_a_wrong_result_is_told_once_and_ends_all_ranks(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, out, err = fsdp(tmp_path, *torchrun, FAILING, "wrong", more=("-o", "x.json"))
    assert code != 0
    assert "recipe" not in out
    assert err.count("error: fsdp tensorwise, eager, bf16 gather: gradient of ") == 1
    assert "nothing was timed" in err
    assert not (tmp_path / "x.json").exists()


def test_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["float8", "bench", "fsdp"])
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for device, wanted in (("cpu", None), ("cpu", 4), ("cuda", None), ("cuda", 3)):
        start_ranks(device, wanted)
    assert [words[words.index("--nproc-per-node") + 1] for words in started] == list("2483")
    assert all(words[-3:] == ["float8_lab.cli.main", "bench", "fsdp"] for words in started)
    with pytest.raises(ValueError, match="ranks: got 9, but there are 8 GPUs here"):
        start_ranks("cuda", 9)
    monkeypatch.setenv("RANK", "0")
    start_ranks("cuda", 9)  # one of them
    assert len(started) == 4
