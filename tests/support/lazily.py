"""Libraries that tests import when they first use them: what only collects tests need not wait."""

import importlib
import importlib.util
from typing import Any

import pytest


class Lazily:
    """A module by its name; a file of tests is skipped if its library is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name
        needs_installed(name.partition(".")[0])

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for some as it collects
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def needs_installed(*libraries: str) -> None:
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}", allow_module_level=True)
