"""Libraries that tests import when they first use them: what only collects tests need not wait."""

import importlib
import importlib.util
import os
import sys
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
    """Skip what needs them, but for `make test`: it installs them all from Python 3.11 on."""
    must_run = "FLOAT8_TESTS_MUST_RUN" in os.environ and sys.version_info >= (3, 11)
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            if must_run:
                raise ModuleNotFoundError(f"got no {name}, which `make test` installs")
            pytest.skip(f"needs {name}", allow_module_level=True)
