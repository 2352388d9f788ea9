"""`float8 train` as torchrun starts it: real processes, which die and are asked to stop."""

import json
import re
import sys
from pathlib import Path

import pytest

from float8_lab.cli import main as main_module
from float8_lab.cli.main import main
from float8_lab.errors import ConfigError, FailedError, RankFailedError
from float8_lab.trainer.run_folder import find_checkpoint
from support.forks import COMPILER, run_program

pytestmark = pytest.mark.xdist_group("programs")

SUPPORT = Path(__file__).parents[1] / "support"
SHORT = ["--device", "cpu", "--batch-size", "2", "--seq-len", "16", "--eval-batches", "1"]
SHORT += ["--no-tensorboard", "--log-interval", "1", "--fsdp"]


def torchrun(here: Path, *words: str, **env: str) -> tuple[int, str, str]:
    program = (SUPPORT / "torchrun.py").read_text()
    script = str(SUPPORT / "trainer_rank.py")
    env |= {"HERE": str(here), "WORDS": json.dumps([script, *words]), "OMP_NUM_THREADS": "1"}
    ended = run_program(program, COMPILER, **env)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def here(text_folder: Path) -> Path:
    return text_folder.parent


TRAIN = ["train", "--data", "text", *SHORT]


def test_a_rank_that_dies_while_saving_leaves_the_former_checkpoint(here: Path) -> None:
    words = [*TRAIN, "--recipe", "delayed", "--fsdp-float8-all-gather", "--steps", "2"]
    words += ["--checkpoint-interval", "1"]
    code, out, err = torchrun(here, *words, "--output", "run", FAILS="1")
    assert code != 0
    assert "another rank is gone" in err
    assert "exitcode  : 9" in err
    checkpoints = here / "run" / "checkpoints"
    kept = {path.name for path in checkpoints.iterdir()}
    assert kept == {"step_00000001", ".unfinished-step_00000002"}
    assert out.count("tiny, 0.7M parameters, float32 on cpu with 1 thread(s), 2 ranks") == 1
    assert out.count("checkpoint: run/checkpoints/step_00000001") == 1

    (checkpoints / ".unfinished-step_00000009").mkdir()  # of an earlier one
    way_on = ["train", "--fsdp", "--fsdp-float8-all-gather", "--resume", "run"]
    assert torchrun(here, *way_on)[0] == 0
    assert not list(checkpoints.glob(".unfinished*"))
    assert find_checkpoint(here / "run").name == "step_00000002"


def test_ctrl_c_lets_all_ranks_save_together(here: Path) -> None:
    words = [*TRAIN, "--steps", "100000", "--output", "run"]
    metrics = str(here / "run" / "metrics.jsonl")
    _, out, err = torchrun(here, *words, METRICS=metrics)
    assert err.count("stopping after this step, with a checkpoint") == 1
    step = int(re.findall(r"interrupted after step (\d+)", out)[0])
    assert find_checkpoint(here / "run").name == f"step_{step:08d}"
    assert "returned a view" not in out  # a warning of FSDP2
    assert "go on with: the same command under torchrun, and --resume run" in out


@pytest.mark.parametrize(
    ("words", "size", "message", "alone"),
    [
        (["train"], "2", "torchrun started 2 ranks", False),
        (["train", "--bogus"], "2", "No such option", True),
        (["compare", "tensorwise"], "1", "compare got ranks of torchrun", False),
    ],
)
def test_wrong_words_are_told_by_the_first_rank_alone(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    size: str,
    message: str,
    alone: bool,
) -> None:
    monkeypatch.setattr(main_module, "_LAST_WORDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", size)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(words) != 0
        out, err = capfd.readouterr()
        assert out == ""
        assert (message in " ".join(err.split())) == (rank == "0" or not alone)
        assert rank == "0" or err.startswith("rank 1: error: ") or (alone and err == "")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (RankFailedError("another is gone"), 1, "rank 1: error: another is gone"),
        (ConfigError("not here"), 2, "rank 1: error: not here"),
        (FailedError("no room"), 1, "rank 1: error: no room"),
        (OSError("no disk"), 2, "rank 1: error: no disk (--debug shows where)"),
        (KeyError("what"), 1, "rank 1: Traceback"),
    ],
)
def test_errors_are_told_by_each_rank_that_meets_them(
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
    assert err.endswith("\n")
    assert ("Traceback" in err) == ("Traceback" in told)
    main(["train", "--debug"])
    assert "Traceback" in capfd.readouterr().err
