"""Every test starts and ends with nothing compiled; in `make test` one worker compiles."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        # The exhaustive ones take so long that getting compilers ready on each worker is nothing.
        if here in item.path.parents and not (
            item.get_closest_marker("xdist_group") or item.get_closest_marker("exhaustive")
        ):
            item.add_marker(pytest.mark.xdist_group("compilers"))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
