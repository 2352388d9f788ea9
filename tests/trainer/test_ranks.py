"""The trainer on several ranks, CPU processes that talk through Gloo."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from float8_lab.errors import ConfigError, RankFailedError
from float8_lab.ranks import Ranks as TrainerRanks
from float8_lab.ranks import explain_lost_rank
from float8_lab.trainer.checkpoint import list_checkpoints
from float8_lab.trainer.metrics import read_metrics
from float8_lab.trainer.run_folder import find_checkpoint
from sqnr import assert_same_bits
from support import trainer_ranks as work
from support.checkpoints import read_tensors
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

BY_ORDER = 2e-6
"""Relative: float32 sums of a few thousand terms in another order."""

Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(tmp_path: Path, text_folder: Path) -> Settings:
    """Settings of runs, each with a folder of its own."""
    outputs = (str(tmp_path / f"run{number}") for number in range(100))
    return lambda **how: {"data": str(text_folder), "output": next(outputs), **how}


def assert_close(got: work.Curves, wanted: work.Curves, bound: float = BY_ORDER) -> None:
    for mine, theirs in zip(got[0], wanted[0], strict=True):
        assert mine == pytest.approx(theirs, rel=bound)
    assert got[1] == pytest.approx(wanted[1], rel=bound)


def state_of(folder: str | Path) -> dict[str, torch.Tensor]:
    return read_tensors(find_checkpoint(Path(folder)))


def test_the_curves_of_two_ranks_are_those_of_one(two: Ranks, settings: Settings) -> None:
    hows: list[dict[str, Any]] = [
        {"eval_interval": 2, "accumulate": 2, "steps": 3},
        {"model": "nano-tied", "grad_clip": 0.0, "steps": 2},
    ]
    wanted = work.several([settings(**how) for how in hows])
    got = two.run(work.several, [settings(fsdp=True, **how) for how in hows])
    for mine, theirs in zip(got[0], wanted, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("recipe", "compile"),
    [("delayed", False), pytest.param("tensorwise", True, marks=pytest.mark.exhaustive)],
)
def test_float8_curves_are_those_of_one_rank_that_takes_the_parts_in_turn(
    two: Ranks, settings: Settings, recipe: str, compile: bool
) -> None:
    # A scale is that of one rank's part of the batch, as it is that of one microbatch.
    how = {"recipe": recipe, "steps": 2}
    wanted = work.curves(settings(batch_size=2, accumulate=2, **how))
    how |= {"batch_size": 4, "fsdp": True}
    # None of this changes a bit.
    more = {"fsdp_float8_all_gather": True, "compile": compile}
    plain, other = two.run(work.several, [settings(**how), settings(**how, **more)])[0]
    assert plain == other
    assert_close((plain[0], []), (wanted[0], []))  # validation has no parts


def test_what_travels(two: Ranks, settings: Settings) -> None:
    how = {"recipe": "tensorwise", "dtype": "bfloat16", "fsdp": True, "steps": 1}
    how["model"] = "nano-tied"  # of two blocks
    assert two.run(work.gathered, settings(**how))[0] == {torch.float32}
    how["fsdp_float8_all_gather"] = True  # bytes of blocks; what is around them is not converted
    assert two.run(work.gathered, settings(**how))[0] == {torch.float32, torch.uint8}


def test_gradients_are_shards_between_microbatches(two: Ranks, settings: Settings) -> None:
    run = settings(fsdp=True, accumulate=3, steps=1)
    assert two.run(work.shards_between_microbatches, run) == [[False, True, True]] * 2


def test_a_checkpoint_goes_from_rank_to_ranks_and_back_bit_by_bit(
    two: Ranks, four: Ranks, settings: Settings, tmp_path: Path
) -> None:
    how = {"recipe": "delayed", "steps": 6, "stop_after": 2, "model": "nano-tied"}
    sharded = {"fsdp": True, "fsdp_float8_all_gather": True}
    first = settings(**how, **sharded)
    two.run(work.curves, first)
    wanted = state_of(first["output"])
    assert any("exp_avg" in name for name in wanted)
    assert any("amax_history" in name for name in wanted)
    source = Path(first["output"])
    for name, ranks, more in (
        ("two to one", None, {}),
        ("one to two", two, sharded),
        ("two to four", four, sharded),
        ("four to one", None, {}),
    ):
        args = settings(**how, **more), find_checkpoint(source), tmp_path / name / "checkpoints"
        work.written_again(*args) if ranks is None else ranks.run(work.written_again, *args)
        source = tmp_path / name
        assert_same_bits(state_of(source), wanted, name)


def test_a_run_goes_on_with_other_ranks(two: Ranks, four: Ranks, settings: Settings) -> None:
    whole = work.curves(settings(steps=4))
    run = settings(steps=4, fsdp=True, stop_after=1)
    output = Path(run["output"])
    two.run(work.curves, run)
    four.run(work.curves, {**run, "stop_after": 2}, output)
    work.curves({**run, "fsdp": False, "stop_after": 3}, output)
    two.run(work.curves, {**run, "stop_after": 0}, output)
    assert_close(work.curves_of(output), whole)


def test_a_wish_to_stop_on_one_rank_stops_all(two: Ranks, settings: Settings) -> None:
    first, second = two.run(work.interrupted, settings(fsdp=True), 1)
    assert first[:2] == second[:2] == ("interrupted", 3)
    assert first[2][-2:] == ["checkpoint 3", "interrupted 3"]
    assert second[2] == []  # only the first rank tells


def test_a_loss_that_is_not_finite_on_one_rank_ends_all(two: Ranks, settings: Settings) -> None:
    run = settings(fsdp=True, log_interval=1)
    for said in two.run(work.error_of, run, "nan", 1):
        assert said.startswith("FailedError: training diverged at step 1: loss nan")
    metrics = read_metrics(Path(run["output"]) / "metrics.jsonl")
    assert ([r.step for r in metrics.train], metrics.status) == ([1], "failed")


FULL = r"CheckpointError: .*_00000002: \[Errno 28\] No space.*; free some space"


@pytest.mark.parametrize(
    ("how", "who", "error"),
    [
        ("other data", 0, "ConfigError: ranks read different data"),
        ("disk full", 0, FULL),
        ("disk full", 1, FULL),
    ],
)
def test_what_fails_on_one_rank_ends_all(
    two: Ranks, settings: Settings, how: str, who: int, error: str
) -> None:
    run = settings(steps=2, fsdp=True)
    for said in two.run(work.error_of, run, how, who):
        assert re.match(error, said)
    assert list_checkpoints(Path(run["output"]) / "checkpoints") == []


def test_damage_of_one_file_is_met_by_all_ranks(two: Ranks, settings: Settings) -> None:
    run = settings(fsdp=True, steps=2, checkpoint_interval=1)
    two.run(work.curves, run)
    of_run = [path for path in Path(run["output"]).iterdir() if path.is_file()]
    before = {path: path.read_bytes() for path in of_run}
    one, newest = list_checkpoints(Path(run["output"]) / "checkpoints")
    files = {path.name for path in newest.iterdir()} - {"checksums.json"}
    assert files == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    assert json.loads((newest / "checksums.json").read_text()).keys() == files
    (newest / "__1_0.distcp").write_bytes(bytes((newest / "__1_0.distcp").stat().st_size))
    for said in two.run(work.error_of, {**run, "steps": 3}, resume=newest):
        assert re.match(rf"CheckpointError: .*__1_0.distcp has other bytes .*--resume {one}", said)
    assert before == {path: path.read_bytes() for path in of_run}


def test_each_rank_has_as_many_sequences() -> None:
    with pytest.raises(ConfigError, match=r"--batch-size got 6 .*multiple of the 4 ranks"):
        TrainerRanks(size=4).share(6)
    shares = [TrainerRanks(rank, 4).share(8) for rank in range(4)]
    assert ["01234567"[share] for share in shares] == ["01", "23", "45", "67"]


def test_a_refused_connection_of_an_observer_is_no_lost_rank() -> None:
    with pytest.raises(RankFailedError), explain_lost_rank():
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [::1]:42")
    with pytest.raises(ConnectionRefusedError), explain_lost_rank():
        raise ConnectionRefusedError(111, "Connection refused")
