"""What a result says about where it was made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from float8_lab.trainer import environment
from float8_lab.trainer.environment import describe_environment, git_commit


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
    monkeypatch.setenv("FLOAT8_COMMIT", "told")
    assert git_commit() == "told"


def test_environment_says_where_but_nothing_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["/home/me/bin/float8", "compare", "/home/me/secret/text", f"{tmp_path}/a", "--steps"]
    monkeypatch.setattr(sys, "argv", words)
    environment = describe_environment(torch.device("cpu"))
    assert environment["torch"] == torch.__version__
    assert environment["device_type"] == "cpu"
    assert environment["device"]
    assert environment["command"] == "float8 compare .../text a --steps"
