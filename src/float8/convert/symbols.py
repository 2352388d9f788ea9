"""What the forward of a class computes, as an expression: run once on symbols.

That is certain only of code that has no branches and reads nothing but attributes of the module and
a few pure functions of torch: it computes one expression, always, and does nothing else. No tensor
is touched.
"""

import dis
import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_PURE = {"torch", "nn", "functional", "silu", "float32", "dtype", "to", "pow", "mean", "rsqrt"}
"""Names that a forward may read of torch and of tensors, besides attributes of its own."""

_NO_PLAIN_FUNCTION = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


class Symbol:
    """What a forward makes of its input: an expression of nested tuples."""

    def __init__(self, *expression: Any) -> None:
        self.expression = expression

    def __getattr__(self, name: str) -> "Symbol":
        return Symbol("attribute", self.expression, name)

    def __call__(self, *args: Any, **kwargs: Any) -> "Symbol":
        """A call of a method, or of a module."""
        return Symbol("call", self.expression, *_plain(args), *sorted(kwargs.items()))

    def __mul__(self, other: Any) -> "Symbol":
        return Symbol("product", self.expression, *_plain([other]))

    def __add__(self, other: Any) -> "Symbol":
        return Symbol("sum", self.expression, *_plain([other]))

    def __bool__(self) -> bool:
        raise TypeError("a symbol has no value")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> "Symbol":
        asked = sorted((name, value) for name, value in (kwargs or {}).items() if value)
        return Symbol("call", func, *_plain(args), *asked)


def _plain(values: Any) -> list[Any]:
    return [value.expression if isinstance(value, Symbol) else value for value in values]


def expression_of(forward: Any, attributes: set[str]) -> tuple[Any, list[str]]:
    """What `forward(self, x)` makes of x, if that is certain, and all reads of `attributes`.

    `x` is `("x",)`, an attribute of the module `("self", name)`. What was read is told, since an
    expression does not show what was called and not used.
    """
    read = _attributes_read(forward, attributes)
    if read is None:
        return None, []
    this = types.SimpleNamespace(**{name: Symbol("self", name) for name in attributes})
    try:
        made = forward(this, Symbol("x"))
    except Exception:  # whatever symbols cannot do
        return None, []
    return (made.expression if isinstance(made, Symbol) else None), read


def _attributes_read(forward: Any, attributes: set[str]) -> list[str] | None:
    """All reads of `attributes` in `forward(self, x)`; None if it branches or knows other names."""
    code = getattr(forward, "__code__", None)
    if code is None or code.co_argcount != 2 or code.co_kwonlyargcount or code.co_freevars:
        return None
    if code.co_flags & _NO_PLAIN_FUNCTION or any(inspect.iscode(x) for x in code.co_consts):
        return None
    if getattr(code, "co_exceptiontable", b""):  # of `with` and `try`, from Python 3.11 on
        return None
    known, read = attributes | _PURE, []
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            value = forward.__globals__.get(each.argval)
            if all(value is not x for x in (torch, nn, F, F.silu)):
                return None
            known.add(each.argval)
        if each.opcode in _JUMPS or each.opname.startswith(("IMPORT_", "DELETE_")):
            return None
        if each.opname.startswith("STORE_") and not each.opname.startswith("STORE_FAST"):
            return None
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each.argval in attributes:
            read.append(each.argval)
    return read if known.issuperset(code.co_names) else None
