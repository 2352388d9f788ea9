"""Blocks under FSDP2 and tensor parallel as `float8 bench` measures them, and what they send."""

import json
import math
import os
import re
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from float8_lab.bench import picture
from float8_lab.bench.fsdp import PASSES, RanksStep, ShardedStep, TrainStep, bench_on_ranks
from float8_lab.bench.model import Size, Stack
from float8_lab.bench.step import Row, free_memory
from float8_lab.bench.variants import Variant, make_variants
from float8_lab.errors import ToldError, WrongResultError
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
    before, RanksStep.at_least = RanksStep.at_least, 1e9
    try:
        return ending(ShardedStep, make_variants(["tensorwise"], ["eager"], gathers=("bf16",)))
    finally:
        RanksStep.at_least = before


def ending(step: Any, variants: list[Variant]) -> str:
    try:
        list(bench_on_ranks(step, variants, TINY, CPU, 1))
    except (WrongResultError, ToldError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def test_a_wrong_gradient_ends_all_ranks_alike(two: Ranks) -> None:
    first, second = two.run(all_wrong)
    why = first.removeprefix("WrongResultError: ")
    assert why.startswith("tensorwise, eager, bf16 gather: output: SQNR ")
    assert "nothing was timed" in why
    assert second == f"ToldError: as rank 0 says: {why}"  # so that one rank tells it


def growing() -> list[list[str]]:
    variants = make_variants(["tensorwise"], ["eager"], gathers=("float8",))
    groups = bench_on_ranks(ShardedStep, variants, TINY, CPU, 1)
    return [[row["recipe"] for row in group if row["ms"]] for group in groups]


def failing() -> list[list[str]]:
    bf16, peer = make_variants(["tensorwise"], ["eager"], gathers=("float8",))
    calls = iter(range(PASSES))

    def convert(model: nn.Module) -> nn.Module:
        if next(calls):
            raise RuntimeError("no memory")
        return peer.convert(model)

    theirs = replace(peer, recipe="torchao tensorwise", config=None, convert=convert)
    *_, rows = bench_on_ranks(ShardedStep, [bf16, theirs], TINY, CPU, 1)
    return [[*row] for row in rows]


def test_a_peer_that_fails_later_has_no_time(two: Ranks) -> None:
    (bf16, peer), _ = two.run(failing)
    assert {"ms", "speedup"} < {*bf16}
    assert "left_out" in peer
    assert not {"ms", "speedup", "tokens_per_s"} & {*peer}


def test_rows_are_there_as_soon_as_they_are_known(two: Ranks) -> None:
    """So that a benchmark which is stopped leaves a file."""
    both = ["bf16", "tensorwise"]
    assert two.run(growing) == [[["bf16"], both, both, both]] * 2


WHOLE = ["--seq-len", "32", "--recipe"]


def test_training_on_two_ranks(two: Ranks, tmp_path: Path) -> None:
    words = [*WHOLE, "tensorwise,delayed", "--checkpointing", "full"]
    rows = rows_of(two, tmp_path, "train", *words)
    assert [(row["recipe"], row["gather"], row["keep"]) for row in rows] == [
        ("bf16", "bf16", "nothing"),
        ("tensorwise", "float8", "nothing"),
        ("delayed", "float8", "nothing"),
    ]
    for row in rows:
        assert row["tokens_per_s_per_gpu"] == pytest.approx(32 / row["ms"] * 1e3, rel=1e-3)
        assert row["speedup"] == pytest.approx(rows[0]["ms"] / row["ms"], rel=1e-3)
        assert row["first_step_s"] > 0
        assert row["loss"] == pytest.approx(math.log(256), abs=0.1)  # few steps of a tiny model
        assert row["sqnr_db"] is None or row["sqnr_db"] > 10


@pytest.mark.parametrize("more", [[], ["--lora"], ["--lora", "--transformers"]], ids=str)
def test_training_on_one_rank(tmp_path: Path, more: list[str]) -> None:
    for library in ("peft", "transformers")[: len(more)]:
        pytest.importorskip(library)
    recipes = ["tensorwise+only", "tensorwise"] if more else ["tensorwise", "delayed+held"]
    one = Ranks(1)
    try:
        assert one.run(
            bench, tmp_path, ["train", *WHOLE, ",".join(recipes), *more, *SMALL, "-o", "x.json"]
        ) == [0]
    finally:
        one.stop()
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["bf16", *recipes]
    assert [row["gather"] for row in rows] == [None] * 3
    if more:  # a base that is cast once computes as one that is cast at each use
        assert rows[1]["loss"] == rows[2]["loss"] != rows[0]["loss"]


def train_on_gpus() -> list[Row]:
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    kept = ["nothing", "gemms+attention"]
    variants = make_variants(["tensorwise"], ["eager"], gathers=("float8",), keep=kept)
    step = partial(TrainStep, lora=False, transformers=False)
    *_, rows = bench_on_ranks(step, variants, Size("tiny", 2, 512), device, 1)
    return rows


@pytest.mark.gpu
def test_training_on_gpus() -> None:
    gpus = Ranks(2, "cuda")
    try:
        rows, _ = gpus.run(train_on_gpus)
    finally:
        gpus.stop()
    names = [("bf16", "bf16"), ("tensorwise", "float8")]
    assert [(row["recipe"], row["gather"]) for row in rows] == 2 * names
    for nothing, more in zip(rows[:2], rows[2:], strict=True):
        assert nothing["loss"] == pytest.approx(more["loss"], rel=1e-3)
        assert nothing["sqnr_db"] is None or nothing["sqnr_db"] > 10
    assert rows[0]["loss"] != rows[1]["loss"]


def wrong_training(what: str) -> str:
    bf16, good = make_variants(["tensorwise"], ["eager"], gathers=("float8",))

    def convert(model: nn.Module) -> nn.Module:
        good.convert(model)
        last = model.get_submodule("layers.0.feed_forward.down")
        if what == "gradients":
            last.register_full_backward_hook(lambda _, given, __: (-given[0],))
        return model

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if what == "updates":
            optimizer.param_groups[0]["lr"] *= -1

    wrong = replace(good, convert=convert, attach=attach)
    return ending(partial(TrainStep, lora=False, transformers=False), [bf16, wrong])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("gradients", r"gradient of \S+: SQNR .* expected at least 3 dB; nothing was timed"),
        ("updates", r"loss \S+ after 10 steps, expected \S+ as of bf16, which began at "),
    ],
)
def test_a_wrong_training_is_refused(two: Ranks, what: str, message: str) -> None:
    first, second = two.run(wrong_training, what)
    assert re.match(rf"WrongResultError: tensorwise, eager, float8 gather: {message}", first)
    assert second.startswith("ToldError: as rank 0 says: tensorwise")


def test_the_plot_of_a_training(tmp_path: Path) -> None:
    about: Any = {"ranks": 2, "model": "tiny", "blocks": None, "batch": 1, "seq_len": 32}
    about |= {"lora": True, "transformers": False, "keep": ["nothing"]}
    results: Any = {"settings": about, "environment": {"device": "GPU"}, "rows": [{"recipe": "x"}]}
    with pytest.raises(
        ValueError, match="plot: got results of bench None, expected those of bench"
    ):
        picture.plot_results(results, tmp_path / "x.png")
    results["benchmark"] = "train"
    with pytest.raises(ValueError, match="plot: got results without memory, expected those of a"):
        picture.plot_results(results, tmp_path / "x.png")
    numbers = {"tokens_per_s_per_gpu": 9e3, "peak_gib": 70.0, "ms": 1.0, "speedup": 1.0}
    results["rows"] += [{"recipe": r, **numbers} for r in ("bf16", "torchao tensorwise", "rowwise")]
    picture.plot_results(results, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def alone() -> None:
    for variant in make_variants(RECIPES, ["eager"], gathers=("bf16", "float8")):
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
