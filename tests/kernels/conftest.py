"""Triton kernels run on the GPU if there is one, else in Triton's interpreter on the CPU.

The interpreter must be chosen before Triton is imported and changes Triton for the whole process,
so test_interpreter.py runs the tests that take ``triton_device`` in a process of their own. This
conftest leaves them out of a process that cannot run them, and all others out of the
interpreter's.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETER


def pytest_configure() -> None:
    """Take from Triton's interpreter what was most of its time.

    It patches Triton's language in each call of a function; here once for each, and what is patched
    stays so: nothing but the interpreter runs here. It makes the type of a block anew for each
    result, and all else that a tensor knows of its type. And it computes all integers a second
    time, to look for overflows, of which it tells nobody.
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

    blocks: dict[object, dict[str, object]] = {}
    tensors: dict[str, dict[str, object]] = {}
    dtypes: dict[str, object] = {}
    block, dtype = interpreter.tl.block_type.__init__, interpreter._get_np_dtype
    tensor = interpreter.tl.tensor.__init__

    def block_once(self: object, of: Any, shape: Any) -> None:
        key = of.name, *(getattr(n, "value", n) for n in shape)
        if key not in blocks:
            block(self, of, shape)
            blocks[key] = {**vars(self)}
        vars(self).update(blocks[key])

    def tensor_once(self: object, handle: object, of: Any) -> None:
        if of.name not in tensors:
            tensor(self, handle, of)
            tensors[of.name] = {**vars(self)}
        vars(self).update(tensors[of.name], handle=handle)

    def dtype_once(of: Any) -> object:
        return dtypes.get(of.scalar.name) or dtypes.setdefault(of.scalar.name, dtype(of.scalar))

    interpreter.tl.block_type.__init__, interpreter._get_np_dtype = block_once, dtype_once
    interpreter.tl.tensor.__init__ = tensor_once
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
