"""Triton kernels run on the GPU if there is one, else in Triton's interpreter on the CPU.

The interpreter must be chosen before Triton is imported and changes Triton for the whole process,
so test_interpreter.py runs the tests that take ``triton_device`` in processes of their own. This
conftest leaves them out of a process that cannot run them, and all others out of the
interpreter's.
"""

import functools
import os
from pathlib import Path

import pytest
import torch

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETER

ONCE = {"dtype": torch.float8_e5m2, "power_of_2": True, "pad_rows": True, "record": False}
"""What the interpreter writes for bfloat16 only; a GPU and `make test-all` cross all."""


def pytest_configure() -> None:
    """Patch Triton's language once per function: the interpreter does so in each call of one.

    That is most of its time. What is patched stays so: nothing but the interpreter runs here.
    """
    if not INTERPRETER:
        return
    from triton.runtime import interpreter

    plain = interpreter._patch_lang

    @functools.cache
    def once(function: object) -> object:
        plain(function)
        return interpreter._LangPatchScope()  # which has nothing to take back

    interpreter._patch_lang = once


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
    for item in items if INTERPRETER else []:
        # Kernels compute in float32: what they read does not depend on what they write.
        given = getattr(getattr(item, "callspec", None), "params", {})
        others = given.get("source") in (torch.float32, torch.float16)
        if others and any(given.get(name) == value for name, value in ONCE.items()):
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture
def triton_device() -> torch.device:
    """Where Triton kernels run in this process."""
    return torch.device("cuda", torch.cuda.current_device()) if GPU else torch.device("cpu")
