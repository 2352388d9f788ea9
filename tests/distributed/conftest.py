"""Ranks that serve all tests of a session."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from support.ranks import Ranks

collect_ignore = [] if dist.is_available() else ["."]


@pytest.fixture(scope="session")
def _two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def _four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture
def two(_two: Ranks) -> Ranks:
    return _two


@pytest.fixture
def four(_four: Ranks) -> Ranks:
    return _four
