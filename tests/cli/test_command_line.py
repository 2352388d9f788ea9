"""The command as users call it; what takes a signal or another environment, in a subprocess."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import float8
from float8_lab.cli.app import COMMANDS
from float8_lab.cli.main import main
from float8_lab.trainer.loop import Trainer

QUICK = ["--device", "cpu", "--batch-size", "2", "--seq-len", "16", "--eval-batches", "1"]
QUICK.append("--no-tensorboard")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors this small only lose by being shared among threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for subprocesses
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a little text in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(500)))
    return tmp_path


def train(*words: str) -> int:
    return main(["train", "--data", "text.txt", "--output", "run", *QUICK, *words])


def test_train_says_what_it_does_in_plain_lines(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--steps", "4", "--log-interval", "1") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "tensorwise: Llama tiny, 0.7M parameters, float32 on cpu with 1 thread(s)" in out
    assert "21 of 22 linear layers run in float8" in out
    assert re.search(r"step 4/4  loss \d\.\d{4}  [\d,]+ tok/s  \d+ ms", out)
    assert re.search(r"finished after step 4 of 4\nvalidation loss \d\.\d{4} nats per byte", out)
    assert "\x1b" not in out  # No bar where there is no terminal.
    assert {path.name for path in Path("run").iterdir()} == {
        "checkpoints",
        "config.json",
        "conversion.txt",
        "metrics.jsonl",
    }


def test_resume_takes_its_settings_from_the_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--steps", "5", "--stop-after", "2", "--seed", "7") == 0
    assert "go on with: float8 train --resume run" in capsys.readouterr().out
    assert main(["train", "--resume", "run"]) == 0
    assert "finished after step 5 of 5" in capsys.readouterr().out
    assert json.loads(Path("run/config.json").read_text())["config"]["seed"] == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_it_says_how_to_go_on(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    plain = Trainer.train_step

    def step(trainer: Trainer) -> None:
        plain(trainer)
        if trainer.step == 3:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        assert train("--steps", "100000") == 130
    out, err = capfd.readouterr()
    assert err == "\nstopping after this step, with a checkpoint (again: stop at once)\n"
    assert "interrupted after step 3 of 100000" in out
    assert "go on with: float8 train --resume run" in out
    assert main(["train", "--resume", "run", "--stop-after", "5"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "fp7"], r"error: .*'fp7'.*tensorwise.*high_precision"),
        (["--data", "missing"], r"error: no data at missing"),
        (["--model", "huge"], r"error: unknown model 'huge': choose one of tiny"),
        (["--seq-len", "100000"], r"error: the train split of text.txt has \d+ bytes"),
        (["--resume", "nowhere"], r"error: nothing to resume at nowhere"),
        (["--output", "text.txt"], r"error: cannot write to text.txt"),
        (["--device", "cuda:77"], r"error: device 'cuda:77' is not there"),
        (["--fsdp"], r"error: --fsdp and --tp need ranks .*: start them by torchrun "),
        (["--batch-size", "9" * 20], r"error: the train split of text.txt .*: lower --batch-size"),
    ],
)
def test_user_errors_are_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert train(*words) == 2
    err = capsys.readouterr().err
    assert re.match(message, err)
    assert err.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "words",
    [["--steps", "0"], ["--seed", "9" * 20], ["--min-lr-ratio", "2"], ["--weight-decay", "nan"]],
)
def test_numbers_out_of_bounds_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert train(*words) == 2
    assert f"Invalid value for '{words[0]}'" in capsys.readouterr().err


def test_debug_shows_the_traceback(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--data", "missing", "--debug") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: no data at missing")


def test_compare_prints_the_table_and_where_the_files_are(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "tensorwise", "--data", "text.txt", "--output", "cmp", "--steps", "3"]
    assert main([*words, *QUICK]) == 0
    out = capsys.readouterr().out
    runs = json.loads(Path("cmp/report.json").read_text())["runs"]
    for run in runs:
        row = next(line for line in out.splitlines() if line.startswith(f" {run['recipe']} "))
        assert f"{run['val_loss']:.4f}" in row
        assert f"{run['val_gap_percent']:+.2f}" in row
    note = "CPUs are for trying float8, not for speed"
    assert out.index(note) < out.index("speed-up")
    assert Path("cmp/report.md").read_text().startswith(note)
    assert "report: cmp/report.json" in out
    assert "loss curves: cmp/loss.png" in out
    assert "train loss: mean of the last tenth of the steps" in out
    assert out.splitlines()[-1].endswith("float8 plan --gpu H100 MODULE:FUNCTION")
    assert not list(Path("cmp").glob("*/checkpoints"))
    assert main([*words, *QUICK]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, *QUICK, "--overwrite"]) == 0


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"float8 {float8.__version__}"
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--resume" in out
    assert "--grad-clip" in out
    assert main(["frobnicate"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["train"], ["compare"]])
def test_help_imports_no_torch(words: list[str]) -> None:
    """It takes seconds of CPU time."""
    program = (
        f"import sys; from float8_lab.cli.main import main; main([*{words}, '--help']); "
        "print(sorted({'torch', 'numpy', 'matplotlib', 'float8'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *shown, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert max(map(len, shown)) <= 80
    for name, text in {} if words else COMMANDS.items():
        assert re.search(rf"{name} +{text[:30]}", done.stdout)


def commands_of(name: str) -> Iterator[tuple[list[str], Any]]:
    command: Any = typer.main.get_command(import_module(f"float8_lab.cli.{name}").app)
    yield [name], command
    for below, each in getattr(command, "commands", {}).items():
        yield [name, below], each


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_whole_names_of_options_in_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words, command in commands_of(name):
        assert main([*words, "--help"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        for option in command.params:
            for text in (*option.opts, *option.secondary_opts):
                assert option.param_type_name == "argument" or text in re.split(r"[\s,]+", out)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_a_command_what_its_own_help_does(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Usage: float8 {name} [OPTIONS]" in shown
    assert f" {COMMANDS[name]} " in shown


def test_without_the_extras_it_says_what_to_install(tmp_path: Path) -> None:
    hidden = tmp_path / "typer.py"
    hidden.write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "float8_lab.cli.main", "train"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == (
        "error: the command line needs typer, which is not installed: "
        "run pip install 'float8[cli]', or in a checkout pip install '.[cli]'\n"
    )


@pytest.mark.parametrize("name", ["tensorboard", "matplotlib"])
def test_an_extra_that_a_run_lacks_is_named(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    for module in [each for each in sys.modules if "tensorboard" in each or each.endswith("plot")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "float8_lab.trainer.compare", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    words = ["train"] if name == "tensorboard" else ["compare", "tensorwise"]
    assert main([*words, "--data", "text.txt", "--steps", "1", *QUICK[:-1]]) == 2
    assert capsys.readouterr().err.startswith(f"error: the command line needs {name}, which is not")
