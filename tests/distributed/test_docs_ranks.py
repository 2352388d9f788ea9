"""The samples for several ranks in README.md and docs/ run, word for word, on CPUs."""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from support.ranks import Ranks

ROOT = Path(__file__).parents[2]
SAMPLES = [
    pytest.param(sample, id=f"{page.relative_to(ROOT).as_posix()}-{index}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for index, sample in enumerate(
        re.findall(r"^```py\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    )
]


def run_sample(sample: str) -> None:
    # The process group is there already.
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        exec(compile(sample, "sample.py", "exec"), {})


def test_there_are_samples() -> None:
    assert len(SAMPLES) > 1


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_sample_runs_on_two_ranks(two: Ranks, sample: str) -> None:
    two.run(run_sample, sample)
