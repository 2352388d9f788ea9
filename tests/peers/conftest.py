"""One worker imports the libraries: all tests but those that share ranks or servers go there."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        # Names of two groups would be joined to that of a third one.
        if here in item.path.parents and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("transformers"))
