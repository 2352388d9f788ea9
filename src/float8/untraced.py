"""What Dynamo must not look into, told without importing Dynamo."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, run in eager mode also where compiled code calls it.

    `torch.compiler.disable` as a decorator does so, too, but imports Dynamo, which takes a second.
    """

    @functools.cache
    def disabled() -> Callable[_P, _R]:
        return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call
