"""The launcher: a rank that fails or hangs fails the test, and the next one starts afresh.

And the samples for several ranks in README.md and docs/ run, word for word, on CPUs.
"""

import contextlib
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.ranks import RankError, Ranks
from support.samples import Sample, run_on_ranks, samples
from support.sharded import here


def total() -> float:
    x = torch.tensor([dist.get_rank() + 1.0], device=here())
    dist.all_reduce(x)
    return x.item()


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.all_reduce(torch.ones(1))


def hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(3600)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(1)
    dist.all_reduce(torch.ones(1))


def test_the_first_error_is_shown_and_the_next_run_works() -> None:
    ranks = Ranks(2)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*rank 1 has had enough"):
        ranks.run(raise_on_rank_1)
    assert ranks.run(total) == [3.0, 3.0]
    with pytest.raises(RankError, match=r"rank 1 died|Connection closed by peer"):
        ranks.run(die_on_rank_1)
    with pytest.raises(TimeoutError, match=r"ranks \[0(, 1)?\] did not return"):
        Ranks(2, timeout=2).run(hang_on_rank_0)
    ranks.stop()


def test_how_each_rank_ends() -> None:
    ranks = Ranks(2)
    assert ranks.endings(total) == ["returned", "returned"]
    mine, other = ranks.endings(die_on_rank_1)
    assert "Connection closed by peer" in mine or "Connection reset by peer" in mine
    assert other == "died"


@pytest.mark.parametrize("sample", samples("py"), ids=lambda sample: sample.name)
def test_the_sample_runs_on_two_ranks(two: Ranks, sample: Sample, tmp_path: Path) -> None:
    for library in sample.needs - {"float8", "torch"}:
        pytest.importorskip(library)
    two.run(run_in, tmp_path, sample.code)


def run_in(folder: Path, code: str) -> None:
    with contextlib.chdir(folder):
        run_on_ranks(code)
