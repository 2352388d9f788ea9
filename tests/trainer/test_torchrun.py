"""`float8 train` as torchrun starts it: real processes, which die and are asked to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from float8_lab.cli import main as main_module
from float8_lab.cli.main import main
from float8_lab.errors import ConfigError, OutOfMemoryError, for_all
from float8_lab.trainer.metrics import read_metrics
from float8_lab.trainer.run_folder import find_checkpoint
from sqnr import same_bits
from support import trainer_ranks as work
from support.checkpoints import read_tensors
from support.limits import HANGS
from support.ranks import Ranks

# One after the other: each has a process per core.
pytestmark = pytest.mark.xdist_group("ranks")

FAILING = str(Path(__file__).parents[1] / "support" / "rank_that_fails.py")
SHORT = ["--device", "cpu", "--batch-size", "2", "--seq-len", "16", "--eval-batches", "1"]
SHORT += ["--no-tensorboard", "--log-interval", "1", "--fsdp"]


def torchrun(here: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*command, "--nproc-per-node", "2", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=here,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=HANGS)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.fixture
def here(text_folder: Path) -> Path:
    return text_folder.parent


TRAIN = ["train", "--data", "text", *SHORT]


def test_a_rank_that_dies_while_saving_leaves_the_former_checkpoint(two: Ranks, here: Path) -> None:
    words = [*TRAIN, "--recipe", "delayed", "--fsdp-float8-all-gather", "--steps", "2"]
    words += ["--checkpoint-interval", "1"]
    code, out, err = end_of(torchrun(here, FAILING, "dies", *words, "--output", "run"))
    assert code != 0
    assert "another rank is gone" in err
    assert "exitcode  : 9" in err
    checkpoints = here / "run" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {
        "step_00000001",
        ".unfinished-step_00000002",
    }
    assert out.count("tiny, 0.7M parameters, float32 on cpu, 2 ranks") == 1
    assert out.count("checkpoint: run/checkpoints/step_00000001") == 1

    words.append("--output")
    way_on = ["train", "--fsdp", "--fsdp-float8-all-gather", "--resume", "run"]
    assert two.run(work.command, here, way_on) == [0, 0]
    assert two.run(work.command, here, [*words, "whole"]) == [0, 0]
    assert not list(checkpoints.glob(".unfinished*"))
    resumed, whole = (read_tensors(find_checkpoint(here / name)) for name in ("run", "whole"))
    assert resumed.keys() == whole.keys()
    for name, value in whole.items():
        assert same_bits(resumed[name], value), name
    runs = [read_metrics(here / name / "metrics.jsonl") for name in ("run", "whole")]
    assert runs[0].validation == runs[1].validation
    for one, other in zip(runs[0].train, runs[1].train, strict=True):
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)


def test_an_error_on_one_rank_ends_all_and_is_shown(here: Path) -> None:
    words = [*TRAIN, "--steps", "100000", "--output", "run"]
    code, _, err = end_of(torchrun(here, FAILING, "raises", *words))
    assert code != 0
    assert "rank 1: Traceback" in err
    root_cause = err.partition("Root Cause")[2]
    assert "ZeroDivisionError: the cause of it all" in root_cause
    assert read_metrics(here / "run" / "metrics.jsonl").status == "failed"


def test_an_error_that_all_ranks_meet_is_said_once(here: Path) -> None:
    words = ["-m", "float8_lab.cli.main", "train", "--data", "missing", *SHORT]
    code, out, err = end_of(torchrun(here, *words))
    assert code != 0
    assert out == ""
    assert err.count("error: no data at missing") == 1
    assert "rank 1: error" not in err
    root_cause = err.partition("Root Cause")[2]
    assert "rank      : 0" in root_cause
    assert "DataError: no data at missing" in root_cause


def test_a_rank_tells_in_a_line_what_it_alone_has_met(here: Path) -> None:
    words = [*TRAIN, "--steps", "1", "--output", "run"]
    _, _, err = end_of(torchrun(here, FAILING, "state", *words))
    message = "could not write the checkpoint run/checkpoints/step_00000001: what a state"
    assert err.count(f"rank 1: error: {message}") == 1
    assert "rank 1: Traceback" not in err
    root_cause = err.partition("Root Cause")[2]
    assert "rank      : 1" in root_cause
    assert f"CheckpointError: {message}" in root_cause


def test_ctrl_c_lets_all_ranks_save_together(here: Path) -> None:
    words = ["-m", "float8_lab.cli.main", *TRAIN, "--steps", "100000", "--output", "run"]
    words += ["--tp", "2", "--sequence-parallel"]
    process = torchrun(here, *words)
    metrics = here / "run" / "metrics.jsonl"
    deadline = time.monotonic() + HANGS
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # to torchrun, as a terminal does
    _, out, err = end_of(process)
    assert err.count("stopping after this step, with a checkpoint") == 1
    step = int(re.findall(r"interrupted after step (\d+)", out)[0])
    assert find_checkpoint(here / "run").name == f"step_{step:08d}"
    assert "returned a view" not in out  # a warning of FSDP2
    assert "--no-python float8 train --fsdp --tp 2 --sequence-parallel --resume run" in out


@pytest.mark.parametrize(
    ("words", "size", "message"),
    [
        (["train"], "2", "torchrun started 2 ranks"),
        (["train", "--bogus"], "2", "No such option"),
        (["compare", "tensorwise"], "1", "compare got ranks of torchrun"),
    ],
)
def test_wrong_calls_are_told_by_the_first_rank_alone(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    size: str,
    message: str,
) -> None:
    monkeypatch.setattr(main_module, "_LAST_WORDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", size)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(words) != 0
        out, err = capfd.readouterr()
        assert out == ""
        assert (message in " ".join(err.split())) == (rank == "0")
        assert rank == "0" or err == ""


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (for_all(ConfigError("met by all")), 2, ""),
        (ConfigError("not here"), 2, "rank 1: error: not here"),
        (OutOfMemoryError("no room"), 1, "rank 1: error: no room"),
        (OSError("no disk"), 2, "rank 1: error: no disk (--debug shows where)"),
        (KeyError("what"), 1, "rank 1: Traceback"),
    ],
)
def test_what_not_all_ranks_meet_is_told_by_each_that_does(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    told: str,
) -> None:
    def fail(**call: object) -> None:
        sys.stdout.write("that it began\n")
        sys.stderr.write("a warning\n")
        raise error

    monkeypatch.setattr(main_module, "_LAST_WORDS", 0.0)
    monkeypatch.setattr("float8_lab.cli.app.command", fail)
    monkeypatch.setenv("RANK", "1")
    assert main(["train"]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"a warning\n{told}")
    assert err.endswith("\n" if told else "warning\n")
    assert ("Traceback" in err) == ("Traceback" in told)
    main(["train", "--debug"])
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fsdp"], r"--fsdp and --tp need ranks .*: use torchrun --nproc-per-node \d+ "),
        (["--tp", "2"], r"--fsdp and --tp need ranks .*: use torchrun --nproc-per-node \d+ "),
        (["--sequence-parallel"], r"--sequence-parallel is for tensor parallel: add --tp N"),
        (["--hsdp", "2"], r"--hsdp is for sharded models: add --fsdp"),
        (["--hsdp", "0"], r"--hsdp must be at least 1, got 0"),
        (
            ["--fsdp-float8-all-gather", "--recipe", "delayed"],
            r"--fsdp-float8-all-gather is for sharded models: add --fsdp",
        ),
        (["--fsdp-float8-all-gather"], r"--fsdp-float8-all-gather needs weights in float8"),
    ],
)
def test_flags_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["train", "--device", "cpu", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
