from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
import torch

from float8_lab import device
from float8_lab.device import Clock, PeakMemory
from float8_lab.trainer.environment import describe_environment, public_path
from support.clock import stopped_clock

CPU = torch.device("cpu")


def test_timer_measures_steps_and_not_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, timer = stopped_clock(monkeypatch), Clock(CPU)
    for _ in range(2):
        timer.mark()
        sleep(0.02)
        timer.mark()
        sleep(0.1)
    steps, between = timer.collect()[::2], timer.collect()
    assert steps == pytest.approx([0.02, 0.02])
    assert between == []
    assert timer.collect() == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a part of a run")
def test_peak_memory_is_that_of_this_run_alone() -> None:
    first = PeakMemory(CPU)
    big = torch.ones(100 << 20, dtype=torch.uint8)
    del big
    peak = first.read()
    assert peak is not None
    assert 95 << 20 < peak < 200 << 20
    second = PeakMemory(CPU)
    small = torch.ones(20 << 20, dtype=torch.uint8)
    peak = second.read()
    assert peak is not None
    assert peak < 60 << 20
    assert len(small) == 20 << 20


def test_peak_memory_is_not_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> int:
        raise OSError(2, "No such file or directory", "/proc/self/status")

    monkeypatch.setattr(device, "_status_bytes", missing)
    memory = PeakMemory(CPU)
    assert memory.read() is None
    assert memory.note.startswith("not measured")


def test_environment_says_where_but_nothing_private(monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path.home())
    monkeypatch.setattr(
        sys, "argv", [f"{home}/venv/bin/float8", "compare", f"{home}/secret/text", "--steps", "3"]
    )
    environment = describe_environment(CPU)
    assert environment["torch"] == torch.__version__
    assert environment["device_type"] == "cpu"
    assert environment["device"]
    assert shlex.split(environment["command"])[:2] == ["float8", "compare"]
    if not Path.cwd().is_relative_to(Path.home()):
        assert home + os.sep not in str(environment)


def test_paths_are_shown_relative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert public_path(str(tmp_path / "a" / "b")) == "a/b"
    assert public_path("already/relative") == "already/relative"
    assert public_path("/somewhere/else/file.txt") == ".../file.txt"
    assert public_path("--steps") == "--steps"
