"""A mark for functions that Dynamo must not look into, set without importing Dynamo."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have `function` run in eager mode also where compiled code calls it.

    `torch.compiler.disable` as a decorator does so, too, but imports Dynamo, which takes a second.
    """
    disabled: list[Callable[_P, _R]] = []  # made once; Dynamo warns of `functools.cache`

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return call
