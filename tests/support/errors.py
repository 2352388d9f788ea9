"""Errors as data: what each must say, and how to provoke it."""

import builtins
from collections.abc import Callable
from typing import Any

import pytest


def require_errors(*rows: tuple[str, Callable[..., object], Any]) -> None:
    """Each row: the type, a colon and a pattern of the text; what raises it; its arguments."""
    for expected, call, given in rows:
        kind, _, match = expected.partition(": ")
        with pytest.raises(getattr(builtins, kind), match=match):
            call(*given)
