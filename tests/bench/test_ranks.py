"""Training and tensor parallel on several ranks as `float8 bench` measures them."""

import json
import math
import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from float8_lab.bench import model
from float8_lab.bench.model import Size
from float8_lab.bench.ranks import TrainStep
from float8_lab.bench.step import PASSES, Row, bench_steps, free_memory
from float8_lab.bench.variants import Variant, make_variants
from float8_lab.cli.main import main
from float8_lab.errors import FailedError, RankFailedError
from float8_lab.ranks import join_ranks, start_ranks
from support.lazily import Lazily
from support.ranks import Ranks, on

pytestmark = pytest.mark.xdist_group("ranks")

picture = Lazily("float8_lab.bench.picture")
CPU = torch.device("cpu")
TINY = Size("tiny", 1, 32)
SMALL = ["--model", "tiny", "--blocks", "1", "--mode", "eager", "--device", "cpu", "--rounds", "1"]
PLAIN = {"lora": False, "microbatches": 1}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 256}
SHAPE |= {"num_key_value_heads": 4, "head_dim": 16}
STEP = partial(TrainStep, size=TINY, device=CPU, **PLAIN)


def bench(folder: Path, words: list[str]) -> int:
    """`float8 bench words` as torchrun would start it on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(dist.get_rank()))
        patch.chdir(folder)
        for name in ("llama", "mixtral"):
            patch.setitem(model.OF_TRANSFORMERS, name, SHAPE)
        return main(["bench", *words])


def rows_of(ranks: Ranks, folder: Path, *words: str) -> list[dict[str, Any]]:
    name, *options = words
    words = (name, *SMALL, *options, "-o", "x.json")
    assert ranks.run(bench, folder, [*words]) == [0] * ranks.size
    return json.loads((folder / "x.json").read_text())["rows"]


@pytest.mark.exhaustive
def test_tensor_parallel(two: Ranks, tmp_path: Path) -> None:
    rows = rows_of(two, tmp_path, "tp", "--seq-len", "64", "--recipe", "delayed")
    assert [row["recipe"] for row in rows] == ["bf16", "delayed"]
    for row in rows:
        assert row["sqnr_db"] > (40 if row["recipe"] == "bf16" else 15)
        assert row["tokens_per_s"] == pytest.approx(64 / row["ms"] * 1e3, rel=1e-3)


@pytest.mark.exhaustive
def test_training_on_two_ranks(two: Ranks, tmp_path: Path) -> None:
    words = ["--recipe", "delayed,delayed+head", "--checkpointing", "full", "--microbatches", "3"]
    rows = rows_of(two, tmp_path, "train", "--seq-len", "32", *words)
    assert [row["recipe"] for row in rows] == ["bf16", "delayed", "delayed+head"]
    assert len({row["loss"] for row in rows}) == 3  # the head makes a difference
    for row in rows:
        assert row["checkpointing"] == "full"
        assert row["tokens_per_s_per_gpu"] == pytest.approx(3 * 32 / row["ms"] * 1e3, rel=1e-3)
        assert row["speedup"] == pytest.approx(rows[0]["ms"] / row["ms"], rel=1e-3)
        assert row["first_step_s"] > 0
        # Few steps of a tiny model, whose first logits have a variance of 1.
        assert math.log(256) - 0.1 < row["loss"] < math.log(256) + 0.6
        assert row["sqnr_db"] is None or row["sqnr_db"] > 10


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    rank = Ranks(1)
    yield rank
    rank.stop()


@pytest.mark.parametrize("more", [[], ["--model", "llama"]], ids=str)
@pytest.mark.exhaustive
def test_training_of_adapters(one: Ranks, tmp_path: Path, more: list[str]) -> None:
    for library in ("peft", "transformers")[: 1 + len(more)]:
        pytest.importorskip(library)
    recipes = ["tensorwise+only", "tensorwise"]
    words = ["train", "--seq-len", "32", "--recipe", ",".join(recipes), "--lora", *more]
    rows = rows_of(one, tmp_path, *words)
    assert [row["recipe"] for row in rows] == ["bf16", *recipes]
    # A base that is cast once computes as one that is cast at each use.
    assert rows[1]["loss"] == rows[2]["loss"] != rows[0]["loss"]


@pytest.mark.exhaustive
def test_training_of_experts(two: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--model", "mixtral", "--seq-len", "32", "--recipe", "tensorwise"]
    bf16, found = rows_of(two, tmp_path, "train", *words)
    assert found["loss"] == pytest.approx(bf16["loss"], abs=0.01)
    assert found["loss"] != bf16["loss"]
    assert 10 < found["sqnr_db"] < 40  # something is in float8


def a_step_of(microbatches: int) -> tuple[list[Any], int]:
    """Gradients of a step, and how many reductions over ranks it took."""
    (bf16,) = make_variants([], ["eager"], sharded=True)
    step = STEP(bf16, microbatches=microbatches)
    step.add_optimizer(0.0)  # which moves no weight
    step.warm_up()
    with torch.profiler.profile() as profiled:
        results = step()
    events = [e for e in profiled.key_averages() if e.key.startswith("c10d::_reduce_scatter")]
    reductions = sum(event.count for event in events)
    return [x.full_tensor() for name, x in results.items() if "gradient" in name], reductions


@pytest.mark.exhaustive
def test_gradients_of_microbatches_add_up_and_are_reduced_once(two: Ranks) -> None:
    results = zip(two.run(a_step_of, 1), two.run(a_step_of, 3), strict=True)
    for (once, few), (added, as_few) in results:
        assert few == as_few > 0
        for one, three in zip(once, added, strict=True):
            torch.testing.assert_close(three, 3 * one)


def train_on_gpus(mode: str) -> list[Row]:
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    kept = ["full", "selective"]
    variants = make_variants(["tensorwise"], [mode], sharded=True, checkpointing=kept)
    step = partial(TrainStep, size=Size("tiny", 2, 512), device=device, **PLAIN)
    *_, rows = bench_steps(step, variants, device, 1)
    return rows


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graphed"])
def test_training_on_gpus(mode: str) -> None:
    gpus = Ranks(2, "cuda")
    try:
        rows, _ = gpus.run(train_on_gpus, mode)
    finally:
        gpus.stop()
    assert [row["recipe"] for row in rows] == 2 * ["bf16", "tensorwise"]
    for full, selective in zip(rows[:2], rows[2:], strict=True):
        assert full["loss"] == pytest.approx(selective["loss"], rel=1e-3)
        assert full["sqnr_db"] is None or full["sqnr_db"] > 10
    assert rows[0]["loss"] != rows[1]["loss"]


@on("two")
@pytest.mark.exhaustive
def test_a_peer_that_fails_later_has_no_time() -> None:
    bf16, peer = make_variants(["tensorwise"], ["eager"], sharded=True)
    calls = iter(range(PASSES))

    def convert(model: nn.Module) -> nn.Module:
        if next(calls):
            raise RuntimeError("no memory")
        return peer.convert(model)

    theirs = replace(peer, recipe="torchao tensorwise", config=None, convert=convert)
    *groups, rows = bench_steps(STEP, [bf16, theirs], CPU, 1)
    first, last = rows
    assert {"ms", "speedup"} < first.keys()
    assert "left_out" in last
    assert not {"ms", "speedup", "tokens_per_s_per_gpu"} & last.keys()
    # There as soon as they are known, so that a benchmark which is stopped leaves a file.
    assert [[row["recipe"] for row in group] for group in groups[:2]] == [
        ["bf16"],
        ["bf16", "torchao tensorwise"],
    ]


def wrong_training(what: str) -> str:
    bf16, good = make_variants(["tensorwise"], ["eager"], sharded=True)

    def convert(model: nn.Module) -> nn.Module:
        good.convert(model)
        last = model.get_submodule("layers.0.feed_forward.down")
        if what == "gradients":
            last.register_full_backward_hook(lambda _, given, __: (-given[0],))
        return model

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if what == "updates":
            optimizer.param_groups[0]["lr"] *= -1

    wrong: list[Variant] = [bf16, replace(good, convert=convert, attach=attach)]
    with pytest.raises(FailedError) as caught:
        list(bench_steps(STEP, wrong, CPU, 1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("gradients", r"gradient of \S+: SQNR .* expected at least 3 dB; nothing was timed"),
        ("updates", r"loss \S+ after 10 steps, expected \S+ as of bf16, which began at "),
    ],
)
@pytest.mark.exhaustive
def test_a_wrong_training_ends_all_ranks_alike(two: Ranks, what: str, message: str) -> None:
    first, second = two.run(wrong_training, what)
    assert re.match(rf"tensorwise, eager: {message}", first)
    assert second == first


@on("two")
@pytest.mark.exhaustive
def test_a_variant_leaves_no_memory_behind() -> None:
    for variant in make_variants(["delayed"], ["eager"], sharded=True):
        step = STEP(variant)
        step()
        weights = [weakref.ref(p) for p in step.model.parameters()]
        del step
        free_memory(CPU)
        assert all(weight() is None for weight in weights), variant.name


@pytest.mark.exhaustive
@on("two")
def test_a_rank_that_is_gone_is_named() -> None:
    with pytest.raises(RankFailedError), join_ranks():
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [::1]:42")


def test_the_picture_of_a_training(tmp_path: Path) -> None:
    about: Any = {"ranks": 2, "model": "tiny", "blocks": None, "batch": 1, "seq_len": 32}
    about |= {"lora": True}
    results: Any = {"settings": about, "environment": {"device": "GPU"}, "rows": [{"recipe": "x"}]}
    numbers = {"tokens_per_s_per_gpu": 9e3, "peak_gib": 70.0, "ms": 1.0, "speedup": 1.0}
    results["rows"] += [{"recipe": r, **numbers} for r in ("bf16", "torchao tensorwise", "rowwise")]
    picture.plot_results(results, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["float8", "bench", "tp"])
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for device, wanted in (("cpu", None), ("cpu", 4), ("cuda", None), ("cuda", 3)):
        start_ranks(device, wanted)
    assert [words[words.index("--nproc-per-node") + 1] for words in started] == list("2483")
    assert all(words[-3:] == ["float8_lab.cli.main", "bench", "tp"] for words in started)
    with pytest.raises(ValueError, match="ranks: got 9, but there are 8 GPUs here"):
        start_ranks("cuda", 9)
    monkeypatch.setenv("RANK", "0")
    start_ranks("cuda", 9)  # one of them
    assert len(started) == 4
