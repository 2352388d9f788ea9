"""Triton kernels run on the GPU if there is one, else in Triton's interpreter on the CPU.

The interpreter must be chosen before Triton is imported and changes Triton for the whole process,
so test_interpreter.py runs the tests that take ``triton_device`` in a process of their own. This
conftest leaves them out of a process that cannot run them, and all others out of the
interpreter's.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.interpreter import INTERPRETER, make_it_faster

GPU = torch.cuda.is_available() and not INTERPRETER


def pytest_configure() -> None:
    if INTERPRETER:
        make_it_faster()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if GPU:
        return
    here = Path(__file__).parent
    dropped = [
        item
        for item in items
        if here in item.path.parents
        and ("triton_device" in getattr(item, "fixturenames", ())) != INTERPRETER
    ]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


@pytest.fixture
def triton_device() -> torch.device:
    """Where Triton kernels run in this process."""
    return torch.device("cuda", torch.cuda.current_device()) if GPU else torch.device("cpu")


@pytest.fixture
def multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Plan launches anew, for a device of so many multiprocessors."""
    modules = [sys.modules[name] for name in sys.modules if name.startswith("float8.kernels.")]
    plans = [value for module in modules for value in vars(module).values()]

    def forget() -> None:
        for plan in plans:
            if hasattr(plan, "cache_clear"):
                plan.cache_clear()

    def set_to(sms: int) -> None:
        for module in modules:
            if hasattr(module, "sm_count"):
                monkeypatch.setattr(module, "sm_count", lambda device: sms)
        forget()

    yield set_to
    forget()
