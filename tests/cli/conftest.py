"""What the tests of the command share: an empty working folder, one thread, refusals."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from float8_lab.cli.main import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder; tensors this small only lose by being shared among threads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for subprocesses
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


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
