"""What runs on several ranks goes to one worker."""

from pathlib import Path

import pytest
import torch.distributed as dist

collect_ignore = [] if dist.is_available() else ["."]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:  # one worker of xdist for all: one set of ranks
            item.add_marker(pytest.mark.xdist_group("ranks"))
