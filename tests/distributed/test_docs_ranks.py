"""The samples for several ranks in README.md and docs/ run, word for word, on CPUs."""

import pytest

from support.ranks import Ranks
from support.samples import Sample, run_on_ranks, samples

SAMPLES = samples("py")


def test_there_are_samples() -> None:
    assert len(SAMPLES) > 1


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_the_sample_runs_on_two_ranks(two: Ranks, sample: Sample) -> None:
    two.run(run_on_ranks, sample.code)
