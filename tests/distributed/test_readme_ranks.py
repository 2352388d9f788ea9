"""The README's sample for several ranks runs, word for word, on CPUs."""

import re
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from support.ranks import Ranks

README = Path(__file__).parents[2] / "README.md"
SAMPLES = re.findall(r"^```py\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def run_sample(sample: str) -> None:
    # The process group is there already.
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        exec(compile(sample, "README.md", "exec"), {})


def test_the_sample_runs_on_two_ranks(two: Ranks) -> None:
    assert len(SAMPLES) == 1
    two.run(run_sample, SAMPLES[0])
