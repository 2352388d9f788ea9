"""Every test starts and ends with no choice of a kernel kept, and nothing compiled."""

from collections.abc import Iterator

import pytest
import torch

from float8.gemm import choice


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    _forget()
    yield
    _forget()


def _forget() -> None:
    choice._measured_choice.cache_clear()
    torch._dynamo.reset()
