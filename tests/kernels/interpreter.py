"""Triton's interpreter, which runs kernels where there is no GPU: whether it does, and faster."""

import functools
import os
from typing import Any

import pytest

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
SLOW = [pytest.mark.exhaustive] * INTERPRETER
"""Marks of a case that a GPU runs always, and the interpreter only among exhaustive ones."""


def make_it_faster() -> None:
    """Take from the interpreter what was most of its time.

    It patches Triton's language in each call of a function; here once for each, and what is patched
    stays so: nothing but the interpreter runs here. It makes the type of a block anew for each
    result, and all else that a tensor knows of its type. And it computes all integers a second
    time, to look for overflows, of which it tells nobody.
    """
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
