"""Training under FSDP2 as `float8 bench fsdp` measures it, on two CPU ranks; and how ranks end."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from float8.bench.block import Stack, StackSize
from float8.bench.fsdp_variants import Plan, sharded_variants
from float8.bench.ranks import RankFailedError, rank_count, run_ranks
from float8.cli.main import main
from float8.measure import WrongResultError
from support import failing_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

TINY = StackSize("tiny", 1, 32)
PLAN = Plan(TINY, ("tensorwise", "delayed"), ("eager", "compiled"), (), 1)


def test_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "tiny", "--blocks", "1", "--seq-len", "32", "--mode", "eager"]
    words += ["--device", "cpu", "--ranks", "2", "--rounds", "1", "-o", "x.json"]
    assert main(["bench", "fsdp", *words]) == 0
    out = capsys.readouterr().out
    assert "1 tiny block(s) under FSDP2 on 2 rank(s), 1 x 32 tokens each" in out
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
    variants = sharded_variants(replace(PLAN, modes=("compiled",), peers=("torchao",)))
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


def test_ranks_report_in_one_process_group() -> None:
    reports = list(run_ranks(failing_ranks.add, (10,), 2, "cpu"))
    assert sorted(reports) == [(0, 21), (1, 21)]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raises", RankFailedError, "rank 1 of 2: KeyError: 'lost'"),
        ("wrong", WrongResultError, "^all zeros$"),
        ("dies", RankFailedError, "rank 1 of 2: it died without a word|rank 0 of 2"),
        ("hangs", RankFailedError, "rank 0 of 2"),
    ],
)
def test_a_rank_that_fails_ends_all(how: str, error: type[Exception], message: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=message):
        list(run_ranks(failing_ranks.fail, (how,), 2, "cpu", timeout=5 if how == "hangs" else None))
    assert time.monotonic() - start < 60


def test_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert rank_count("cpu", None) == 2
    assert rank_count("cpu", 4) == 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert rank_count("cuda", None) == 8
    with pytest.raises(ValueError, match="ranks: got 9, but there are 8 GPUs here"):
        rank_count("cuda", 9)
