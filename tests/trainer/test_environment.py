"""What a result says about where it was made."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

import float8
from float8_lab.trainer.environment import describe_environment


def test_the_version_is_known_without_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert describe_environment(torch.device("cpu"))["float8"] == float8.__version__
