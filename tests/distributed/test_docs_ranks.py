"""The samples for several ranks in README.md and docs/ run, word for word, on CPUs."""

import os
from pathlib import Path

import pytest

from support.ranks import Ranks
from support.samples import Sample, run_on_ranks, samples

SAMPLES = samples("py")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_the_sample_runs_on_two_ranks(two: Ranks, sample: Sample, tmp_path: Path) -> None:
    for library in sample.needs - {"float8", "torch"}:
        pytest.importorskip(library)
    two.run(run_in, tmp_path, sample.code)


def run_in(folder: Path, code: str) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        run_on_ranks(code)
    finally:
        os.chdir(before)
