"""Every test starts and ends with nothing compiled; one worker makes compilers ready."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("compilers"))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
