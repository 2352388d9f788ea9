"""What a result says about where it was made."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest
import torch

import float8
from float8_lab.trainer import environment
from float8_lab.trainer.environment import describe_environment, git_commit


def test_the_version_is_known_without_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert describe_environment(torch.device("cpu"))["float8"] == float8.__version__


def test_a_commit_is_dirty_with_any_change_to_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    module = tmp_path / "src" / "float8_lab" / "trainer" / "environment.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    monkeypatch.setattr(environment, "__file__", str(module))
    git("init")
    assert git_commit() is None  # not a part of the repository, as an installed package
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("not the source")
    assert git_commit() == commit
    new = tmp_path / "src" / "float8" / "new.py"
    new.parent.mkdir()
    new.write_text("")
    assert git_commit() == f"{commit}-dirty"
    new.unlink()
    module.write_text("changed")
    assert git_commit() == f"{commit}-dirty"
