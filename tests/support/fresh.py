"""Functions run in a process of their own, which knows nothing of this one."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`; the function is one of a module in `support`."""
    threads = torch.get_num_threads()  # sums depend on it
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (threads,)) as pool:
        return pool.submit(function, *args).result()
