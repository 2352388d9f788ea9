"""What runs on several ranks goes to one worker."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.devices import GPU
from support.ranks import Ranks

collect_ignore = [] if dist.is_available() else ["."]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:  # one worker of xdist for all: one set of ranks
            # GPUs have a worker of their own, which no CPU rank waits for.
            group = "nccl" if item.get_closest_marker("gpu") else "ranks"
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def two_gpus() -> Iterator[Ranks]:
    """Only for tests with the marker `gpu`, as the next."""
    yield from _gpus(2)


@pytest.fixture(scope="session")
def four_gpus() -> Iterator[Ranks]:
    yield from _gpus(4)


def _gpus(count: int) -> Iterator[Ranks]:
    there = sum(
        torch.cuda.get_device_capability(n) >= (8, 9) for n in range(torch.cuda.device_count())
    )
    enough = there >= count or (there and "FLOAT8_TESTS_SHARE_GPUS" in os.environ)
    if not enough or not dist.is_nccl_available():
        pytest.skip(f"needs NCCL and {count} GPUs with float8 tensor cores, there are {there}")
    ranks = Ranks(count, "cuda")
    yield ranks
    ranks.stop()


@pytest.fixture(params=["two", pytest.param("two_gpus", marks=GPU)])
def either(request: pytest.FixtureRequest) -> Ranks:
    """Two CPU ranks through Gloo, and two GPUs through NCCL."""
    ranks: Ranks = request.getfixturevalue(request.param)
    return ranks


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.exhaustive)])
def two_or_four(request: pytest.FixtureRequest) -> Ranks:
    """CPU ranks, of which two start in `make test`."""
    ranks: Ranks = request.getfixturevalue(request.param)
    return ranks
