"""The command as users call it; what takes a signal or another environment, in a subprocess."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import float8
from float8_lab.cli.app import COMMANDS
from float8_lab.cli.main import main
from support.limits import HANGS

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


def spawn(words: Sequence[str], **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "float8_lab.cli.main", *words]
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_train_says_what_it_does_in_plain_lines(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--steps", "4", "--log-interval", "1", "--recipe", "tensorwise") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "tensorwise: Llama tiny, 0.7M parameters, float32 on cpu" in out
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


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(here: Path) -> None:
    words = ["train", "--data", "text.txt", "--output", "run", *QUICK, "--steps", "100000"]
    process = spawn([*words, "--log-interval", "1"], cwd=here)
    metrics = here / "run" / "metrics.jsonl"
    deadline = time.monotonic() + HANGS
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "go on with: float8 train --resume run" in out
    step = int(re.findall(r"interrupted after step (\d+)", out)[0])
    assert (here / "run" / "checkpoints" / f"step_{step:08d}").is_dir()
    assert main(["train", "--resume", "run", "--stop-after", str(step + 2)]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "fp7"], r"error: .*'fp7'.*tensorwise.*high_precision"),
        (["--data", "missing"], r"error: no data at missing"),
        (["--model", "huge"], r"error: unknown model 'huge': choose one of tiny"),
        (["--steps", "0"], r"error: --steps must be at least 1, got 0"),
        (["--seq-len", "100000"], r"error: the train split of text.txt has \d+ bytes"),
        (["--resume", "nowhere"], r"error: nothing to resume at nowhere"),
        (["--output", "text.txt"], r"error: cannot write to text.txt"),
        (["--device", "cuda:77"], r"error: device 'cuda:77' is not there"),
        (["--device", "cpu:7"], r"error: device 'cpu:7' is not there: .*use cpu"),
        (["--learning-rate", "inf"], r"error: --learning-rate must be a finite number, got inf"),
        (["--learning-rate", "nan"], r"error: --learning-rate must be a finite number, got nan"),
        (["--seed", "9" * 20], r"error: --seed must be a number that fits 64 bits, got 9+"),
        (["--batch-size", "9" * 20], r"error: --batch-size must be a number that fits 64 bits"),
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


def test_after_a_failure_the_same_folder_can_be_used_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--steps", "4", "--learning-rate", "1e30", "--grad-clip", "0") == 1
    assert re.search(r"^error: training diverged at step \d", capsys.readouterr().err, re.MULTILINE)
    assert train("--steps", "2") == 0
    assert "finished after step 2 of 2" in capsys.readouterr().out
    assert Path("run/failed-1/metrics.jsonl").exists()


def test_compare_resume_over_a_damaged_config_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "tensorwise", "--data", "text.txt", "--output", "cmp", "--steps", "1"]
    assert main([*words, *QUICK]) == 0
    Path("cmp/tensorwise/config.json").write_text('{"config": ')
    capsys.readouterr()
    assert main([*words, *QUICK, "--resume"]) == 2
    err = capsys.readouterr().err
    assert re.match(r"error: cannot read the settings .*cmp/tensorwise.*: delete that folder", err)
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--data", "missing", "--debug") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: no data at missing")


def test_a_truncated_checkpoint_is_one_line_and_nothing_is_lost(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--steps", "6", "--stop-after", "4", "--checkpoint-interval", "2") == 0
    newest = Path("run/checkpoints/step_00000004")
    tensors = next(newest.glob("*.distcp"))
    os.truncate(tensors, 1000)
    before = Path("run/metrics.jsonl").read_text()
    capsys.readouterr()
    assert main(["train", "--resume", "run"]) == 2
    err = capsys.readouterr().err
    assert re.match(
        r"error: the checkpoint .*step_00000004 is damaged \(the contents of .*distcp have", err
    )
    assert "resume from that" in err
    assert err.count("\n") == 1
    assert Path("run/metrics.jsonl").read_text() == before
    older = re.findall(r"older one is (\S+):", err)[0]
    assert main(["train", "--resume", older]) == 0


def test_changed_settings_are_named_on_resume(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--steps", "4", "--stop-after", "2") == 0
    assert main(["train", "--resume", "run", "--learning-rate", "0.5"]) == 2
    assert "learning_rate was 0.002 and is now 0.5" in capsys.readouterr().err


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
    assert "report: cmp/report.json" in out
    assert "loss curves: cmp/loss.png" in out
    assert not list(Path("cmp").glob("*/checkpoints"))
    assert main([*words, *QUICK]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, *QUICK, "--overwrite"]) == 0


def test_compare_refuses_an_unknown_recipe_before_running(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "tensorwise", "fp7", "--data", "text.txt", "--output", "cmp"]) == 2
    out, err = capsys.readouterr()
    assert re.match(r"error: .*fp7", err)
    assert out == ""
    assert not Path("cmp").exists()


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"float8 {float8.__version__}"
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--resume" in out
    assert "--grad-clip" in out
    assert main(["frobnicate"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_imports_no_torch() -> None:
    """It takes seconds of CPU time."""
    program = (
        "import sys; from float8_lab.cli.main import main; main(['--help']); "
        "print(sorted({'torch', 'numpy', 'matplotlib', 'float8'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *shown, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert max(map(len, shown)) <= 80
    for name, text in COMMANDS.items():
        assert re.search(rf"{name} +{text[:30]}", done.stdout)


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
    process = spawn(["train"], env=environment)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 2
    assert err == (
        "error: the command line needs typer, which is not installed: "
        "run pip install '.[cli]' in a checkout of float8\n"
    )
