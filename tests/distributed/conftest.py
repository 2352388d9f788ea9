"""Ranks that serve all tests of a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from support.ranks import Ranks

collect_ignore = [] if dist.is_available() else ["."]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:  # one worker of xdist for all: one set of ranks
            item.add_marker(pytest.mark.xdist_group("ranks"))


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
