"""Functions run in another process, which knows nothing of this one."""

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

ONE_WORKER = pytest.mark.xdist_group("fresh")
"""For tests that use it, so that there is one such process."""


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)`; the function is one of a module in `support`.

    The process serves all tests of a session and runs nothing else: it has seen other functions
    that came before, but nothing of what happened here.
    """
    return _pool(torch.get_num_threads()).submit(function, *args).result()


@functools.cache
def _pool(threads: int) -> ProcessPoolExecutor:
    """One process; sums depend on its number of threads."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, torch.set_num_threads, (threads,))
