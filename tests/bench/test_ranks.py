"""Blocks under FSDP2 and tensor parallel as `float8 bench` measures them, and what they send."""

import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from float8.convert.measure import WrongResultError
from float8_lab.bench import fsdp
from float8_lab.bench.fsdp import ShardedStep, bench_on_ranks
from float8_lab.bench.model import Size, Stack
from float8_lab.bench.step import free_memory
from float8_lab.bench.variants import make_variants
from float8_lab.errors import ToldError
from float8_lab.models.presets import preset
from float8_lab.ranks import start_ranks
from support.ranks import Ranks
from support.trainer_ranks import command

pytestmark = pytest.mark.xdist_group("ranks")

CPU = torch.device("cpu")
TINY = Size("tiny", 1, 32)
RECIPES = ["tensorwise", "delayed"]
SMALL = ["--model", "tiny", "--blocks", "1", "--mode", "eager", "--device", "cpu", "--rounds", "1"]
PARAMETERS = dict(Stack(TINY.config, 32).named_parameters())
LINEAR = sum(p.numel() for p in PARAMETERS.values() if p.ndim == 2)
NORMS = sum(p.numel() for p in PARAMETERS.values() if p.ndim == 1)


def bench(folder: Path, words: list[str]) -> int:
    """`float8 bench words` as torchrun would start it on this rank."""
    os.environ["RANK"] = str(dist.get_rank())
    try:
        return command(folder, ["bench", *words])
    finally:
        del os.environ["RANK"]


def rows_of(two: Ranks, folder: Path, *words: str) -> list[dict[str, Any]]:
    assert two.run(bench, folder, [*words, *SMALL, "-o", "x.json"]) == [0, 0]
    return json.loads((folder / "x.json").read_text())["rows"]


def test_fsdp(two: Ranks, tmp_path: Path) -> None:
    words = ["fsdp", "--seq-len", "32", "--masters", "--keep", "gemms"]
    found = rows_of(two, tmp_path, *words)
    rows = {(row["recipe"], row["gather"]): row for row in found}
    floats = [(recipe, gather) for recipe in RECIPES for gather in ("bf16", "float8")]
    assert list(rows) == [("bf16", "bf16"), *floats]
    for (recipe, gather), row in rows.items():
        size = 1 if gather == "float8" else 2
        whole = 2 * (size * LINEAR + 2 * NORMS)  # forward and backward
        assert row["gathered_mb"] == pytest.approx(whole / 1e6, rel=1e-5)
        assert row["reduce_scattered_mb"] == pytest.approx(4 * (LINEAR + NORMS) / 1e6, rel=1e-5)
        # Attached to the optimizer: of the sync, and for the scales of all weights.
        assert row["all_reduces"] == (recipe == "delayed") + (gather == "float8")
        assert row["keep"] == "gemms"
        assert row["tokens_per_s"] == pytest.approx(2 * 32 / row["ms"] * 1e3, rel=1e-3)
        assert row["peak_gib"] is None  # a CPU


def test_tensor_parallel(two: Ranks, tmp_path: Path) -> None:
    recipes = "tensorwise,delayed,rowwise"
    found = rows_of(two, tmp_path, "tp", "--seq-len", "64", "--recipe", recipes)
    rows = {row["recipe"]: row for row in found}
    assert list(rows) == ["bf16", *recipes.split(",")]
    tokens = 64 * preset("tiny").model.dim  # elements that are gathered, in 4 places
    for recipe, row in rows.items():
        size = 2 if recipe == "bf16" else 1
        scales = 4 * 64 * 4 if recipe == "rowwise" else 0  # of rows
        whole = 4 * size * tokens + scales
        assert row["gathered_mb"] == pytest.approx(whole / 1e6, rel=1e-5), recipe
        assert row["reduce_scattered_mb"] == pytest.approx(4 * 2 * tokens / 1e6, rel=1e-5)
        assert row["sqnr_db"] > (40 if recipe == "bf16" else 15)
    # Of 7 weights; and of the sync, or of 4 inputs and 7 gradients.
    assert [row["all_reduces"] for row in rows.values()] == [0, 18, 8, 0]


def all_wrong() -> str:
    fsdp.AT_LEAST, before = 1e9, fsdp.AT_LEAST
    try:
        variants = make_variants(["tensorwise"], ["eager"], sharded=True)
        list(bench_on_ranks(ShardedStep, variants, TINY, CPU, 1))
    except (WrongResultError, ToldError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        fsdp.AT_LEAST = before
    raise AssertionError("nothing was raised")


def test_a_wrong_gradient_ends_all_ranks_alike(two: Ranks) -> None:
    first, second = two.run(all_wrong)
    why = first.removeprefix("WrongResultError: ")
    assert why.startswith("fsdp tensorwise, eager, bf16 gather: gradient of ")
    assert "nothing was timed" in why
    assert second == f"ToldError: as rank 0 says: {why}"  # so that one rank tells it


def alone() -> None:
    for variant in make_variants(RECIPES, ["eager"], sharded=True):
        step = ShardedStep(variant, TINY, CPU)
        step()
        weights = [weakref.ref(p) for p in step.model.parameters()]
        del step
        free_memory(CPU)
        assert all(weight() is None for weight in weights), variant.name


def test_a_variant_leaves_no_memory_behind(two: Ranks) -> None:
    two.run(alone)


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
