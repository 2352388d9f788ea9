"""Training under FSDP2 as `float8 bench fsdp` measures it, on two CPU ranks; and how ranks end."""

import json
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from float8.convert.measure import WrongResultError
from float8_lab.bench import fsdp
from float8_lab.bench import variants as variants_module
from float8_lab.bench.block import Stack, StackSize
from float8_lab.bench.fsdp import Plan, build_and_free, same_bits
from float8_lab.bench.ranks import rank_count, run_ranks
from float8_lab.bench.step import check
from float8_lab.cli.main import main
from float8_lab.errors import RankFailedError
from support import failing_ranks

TINY = StackSize("tiny", 1, 32)
RECIPES = ["tensorwise", "delayed"]


def test_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "tiny", "--blocks", "1", "--seq-len", "32", "--mode", "eager"]
    words += ["--device", "cpu", "--ranks", "2", "--rounds", "1", "-o", "x.json"]
    assert main(["bench", "fsdp", *words]) == 0
    out = capsys.readouterr().out
    assert "1 tiny block(s), 1 x 32 tokens each, under FSDP2 on 2 rank(s)" in out
    assert "  11/11" in out
    results = json.loads(Path("x.json").read_text())
    assert {"device", "torch", "git_commit", "command"} <= results["environment"].keys()
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
        scales = recipe == "delayed" or gather == "float8"
        assert traffic["all_reduces"] == int(scales)  # attached to the optimizer
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
    variants = Plan(
        TINY, 1, {"recipes": RECIPES, "modes": ["compiled"], "peers": ["torchao"]}
    ).variants()
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
        for variant in Plan(TINY, 1, {"recipes": RECIPES, "modes": ["eager"]}).variants():
            with build_and_free(variant, TINY, torch.device("cpu")) as step:
                step.first_gradients()
                step.optimize()
                weights = [weakref.ref(p) for p in step.model.parameters()]
            assert all(weight() is None for weight in weights), variant.name
    finally:
        dist.destroy_process_group()


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


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raises", RankFailedError, "rank 1 of 2: KeyError: 'lost'"),
        ("wrong", WrongResultError, "^all zeros$"),
        ("dies", RankFailedError, "rank 1 of 2: died without a word, exit code 3"),
        ("hangs", RankFailedError, "rank 0 of 2"),
    ],
)
def test_a_rank_that_fails_ends_all(how: str, error: type[Exception], message: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=message):
        list(run_ranks(failing_ranks.fail, (how,), 2, "cpu", timeout=2 if how == "hangs" else 180))
    assert time.monotonic() - start < 60


def test_the_command_says_which_rank_failed_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(work, args, ranks, device_type):
        raise RankFailedError(f"rank 1 of {ranks}: OutOfMemoryError: no memory")

    monkeypatch.setattr(fsdp, "run_ranks", run_ranks)
    assert main(["bench", "fsdp", "--model", "tiny", "--device", "cpu", "--ranks", "3"]) == 1
    assert capsys.readouterr().err == "error: rank 1 of 3: OutOfMemoryError: no memory\n"


def test_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert rank_count("cpu", None) == 2
    assert rank_count("cpu", 4) == 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert rank_count("cuda", None) == 8
    with pytest.raises(ValueError, match="ranks: got 9, but there are 8 GPUs here"):
        rank_count("cuda", 9)
