"""Benchmarks of tensors so small only lose by being shared among threads."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

collect_ignore = [] if dist.is_available() else ["test_ranks.py"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
