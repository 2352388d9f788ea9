"""Triton kernels run on the GPU if there is one, else in Triton's interpreter on the CPU.

The interpreter must be chosen before Triton is imported and changes Triton for the whole process,
so test_interpreter.py runs the tests that take ``triton_device`` in processes of their own. This
conftest leaves them out of a process that cannot run them, and all others out of the
interpreter's.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETER


def pytest_configure() -> None:
    """Take from Triton's interpreter what was most of its time.

    It patches Triton's language in each call of a function; here once for each, and what is patched
    stays so: nothing but the interpreter runs here. And it computes all integers a second time, to
    look for overflows, of which it tells nobody.
    """
    if not INTERPRETER:
        return
    from triton.runtime import interpreter

    plain = interpreter._patch_lang

    @functools.cache
    def once(function: object) -> object:
        plain(function)
        # As NumPy wants it from 2.4 on.
        interpreter.tl.tensor.__index__ = lambda self: self.handle.data.item()
        return interpreter._LangPatchScope()  # which has nothing to take back

    interpreter._patch_lang = once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


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
