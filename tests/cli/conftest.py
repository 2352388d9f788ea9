"""What the tests of the command share: an empty working folder, refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest

from float8_lab.cli.main import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for subprocesses
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call the command with these words and return the one line that it says of an error."""

    def call(*words: str, code: int = 2) -> str:
        assert main([*words]) == code
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err.removeprefix("error: ")

    return call
