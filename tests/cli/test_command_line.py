"""The command as users call it; what takes a signal or another environment, in a subprocess."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import float8
from float8_lab.bench.model import Size, Whole
from float8_lab.cli import main as main_module
from float8_lab.cli.app import COMMANDS
from float8_lab.cli.main import main
from float8_lab.cli.progress import stop_on_signals
from float8_lab.errors import ConfigError, FailedError, RankFailedError
from float8_lab.trainer.loop import Trainer
from support.rings import short

QUICK = ["--device", "cpu", "--batch-size", "2", "--seq-len", "16", "--eval-batches", "1"]
QUICK.append("--no-tensorboard")


@pytest.fixture(autouse=True)
def text(here: Path) -> None:
    (here / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(500)))


def train(*words: str) -> int:
    return main(["train", "--data", "text.txt", "--output", "run", *QUICK, *words])


def test_train_says_what_it_does_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--steps", "4", "--log-interval", "1") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "tensorwise: Llama tiny, 0.3M parameters, float32 on cpu with 1 thread(s)" in out
    assert "14 of 15 linear layers run in float8" in out
    assert re.search(r"step 4/4  loss \d\.\d{4}  [\d,]+ tok/s  \d+ ms", out)
    assert re.search(r"finished after step 4 of 4\nvalidation loss \d\.\d{4} nats per byte", out)
    assert "\x1b" not in out  # No bar where there is no terminal.


def test_a_run_that_diverges_says_so_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--steps", "1", "--warmup-steps", "0", "--learning-rate", "1e39") == 1
    out, err = capsys.readouterr()
    assert "finished" not in out
    assert re.match("error: training diverged at step 1: validation loss nan. The metrics", err)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", ""],
        *(["plan", option, ""] for option in ("--gpu", "--model", "--device", "--recipe", "-o")),
        *(["train", option, ""] for option in ("--model", "--recipe", "--data", "--output")),
        *(["train", option, ""] for option in ("--device", "--dtype", "--resume")),
        ["compare", ""],
        ["compare", "tensorwise", "--output", ""],
        *(["bench", "model", option, ""] for option in ("--recipe", "--peers", "--checkpointing")),
        *(["bench", "model", option, ""] for option in ("--model", "--mode", "--device", "-o")),
        ["bench", "model", "--recipe", "tensorwise,"],
        ["bench", "experts", "--shape", ""],
    ],
)
def test_an_empty_text_is_no_default(words: list[str], refused: Callable[..., str]) -> None:
    assert re.match(
        r"\w+: got (an empty text, expected a|'', expected a name end)", refused(*words)
    )


def test_resume_takes_its_settings_from_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--steps", "5", "--stop-after", "2", "--seed", "7") == 0
    assert "go on with: float8 train --resume run" in capsys.readouterr().out
    assert main(["train", "--resume", "run"]) == 0
    assert "finished after step 5 of 5" in capsys.readouterr().out
    assert json.loads(Path("run/config.json").read_text())["config"]["seed"] == 7
    assert main(["train", "--resume", "run", "--output", "elsewhere"]) != 0
    assert "got elsewhere for a run that ended after step 5" in capsys.readouterr().err
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize("number", short({1}, [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_leaves_a_checkpoint_and_it_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: signal.Signals
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


def test_the_second_signal_acts_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        with stop_on_signals() as stop:
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            signal.raise_signal(signal.SIGTERM)
            assert stop.is_set()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, usual)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "fp7"], r"recipe.*'fp7'.*tensorwise.*high_precision"),
        (["--recipe", "nowhere:mine"], "recipe: 'nowhere:mine' cannot be imported in .*; call it"),
        (["--recipe", "os:sep"], "recipe: 'os:sep' is a str, expected a Float8"),
        (["--data", "missing"], r"no data at missing"),
        (["--resume", "nowhere"], r"nothing to resume at nowhere"),
        (["--output", "text.txt"], r"cannot write to text.txt"),
        (["--batch-size", "9" * 20], r"the train split of text.txt .*: lower --batch-size"),
    ],
)
def test_user_errors_are_one_line(
    refused: Callable[..., str], words: list[str], message: str
) -> None:
    given = ["train", "--data", "text.txt", "--output", "run", *QUICK]
    assert re.search(message, refused(*given, *words))
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("words", "message", "alone"),
    [
        (
            ["train", *QUICK],
            "WORLD_SIZE: got 2, expected 1 or none, .*: start it without torchrun",
            False,
        ),
        (["compare", "tensorwise", *QUICK], "WORLD_SIZE: got 2, expected 1 or none", False),
        (["bench", "train", "--bogus"], "No such option", True),
    ],
)
def test_what_is_refused_under_torchrun(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
    alone: bool,
) -> None:
    """The trainer, by each rank; wrong words, by the first one alone."""
    monkeypatch.setattr(main_module, "_LAST_WORDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main([*words, "--data", "text.txt"]) != 0
        out, err = capfd.readouterr()
        assert out == ""
        assert bool(re.search(message, " ".join(err.split()))) == (rank == "0" or not alone)
        assert rank == "0" or err.startswith("rank 1: error: ") or (alone and err == "")
    assert [path.name for path in Path().iterdir()] == ["text.txt"]


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
    assert main(["bench"]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"a warning\n{told}")
    assert err.endswith("\n")
    assert ("Traceback" in err) == ("Traceback" in told)
    main(["bench", "--debug"])
    assert "Traceback" in capfd.readouterr().err


def test_numbers_out_of_bounds_are_refused_and_debug_shows_tracebacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--steps", "0"], ["--seed", "9" * 20], ["--weight-decay", "nan"]):
        assert train(*words) == 2
        assert f"Invalid value for '{words[0]}'" in capsys.readouterr().err
    assert train("--data", "missing", "--debug") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: no data at missing")


def test_compare_prints_the_table_and_where_the_files_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = (
        "from float8 import Float8LinearConfig\ndef mine(): return Float8LinearConfig(emulate=True)"
    )
    Path("my_recipes.py").write_text(mine)
    words = ["--data", "text.txt", "--output", "cmp", "--steps", "3", *QUICK]
    assert main(["compare", "my_recipes:mine", *words]) == 0
    out = capsys.readouterr().out
    runs, names = json.loads(Path("cmp/report.json").read_text())["recipes"], []
    for run in runs:
        row = next(line for line in out.splitlines() if line.startswith(f"{run['recipe']} "))
        names.append(run["recipe"])
        assert f"{run['val_loss']:.4f}" in row
        assert f"{run['val_gap_percent']:+.2f}" in row
        assert row.endswith(f" {run['noise_percent']:.2f}")
    assert names == ["high_precision", "my_recipes:mine"]
    assert "On CPUs float8 is slower" in out
    assert "report: cmp/report.json, cmp/report.txt" in out
    assert all(run["recipe"] in Path("cmp/report.txt").read_text() for run in runs)
    assert not list(Path("cmp").glob("*/checkpoints"))
    assert main(["compare", "tensorwise", *words]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["compare", "tensorwise", *words, "--overwrite"]) == 0


@pytest.mark.parametrize("words", short({2}, [[], ["train"], ["compare"]]))
def test_help_imports_no_torch(words: list[str]) -> None:
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


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_the_list_does_and_whole_names_of_options_in_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command: Any = typer.main.get_command(import_module(f"float8_lab.cli.{name}").app)
    below = getattr(command, "commands", {})
    for words, each in [([name], command), *(([name, sub], x) for sub, x in below.items())]:
        assert main([*words, "--help"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        for option in each.params:
            for text in (*option.opts, *option.secondary_opts):
                assert option.param_type_name == "argument" or text in re.split(r"[\s,]+", out)
        assert len(words) > 1 or f" {COMMANDS[name]} " in " ".join(out.split())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"float8 {float8.__version__}"
    assert main(["frobnicate"]) == 2
    assert "Traceback" not in capsys.readouterr().err


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


def test_without_the_library_of_a_model_it_says_what_to_install(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, **kwargs: Any) -> None:
        Whole(Size("mixtral", 1), torch.device("meta"), torch.float32)

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("float8_lab.cli.bench._measure_on_ranks", build)  # starts no ranks
    told = refused("bench", "train", "--model", "mixtral")
    needs = "the command line needs transformers, which is not installed"
    assert told == f"{needs}: run pip install transformers\n"


@pytest.mark.parametrize("name", ["tensorboard", "matplotlib"])
def test_an_extra_that_a_run_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for module in [each for each in sys.modules if "tensorboard" in each or each.endswith("plot")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "float8_lab.trainer.compare", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    words = ["train"] if name == "tensorboard" else ["compare", "tensorwise"]
    assert main([*words, "--data", "text.txt", "--steps", "1", *QUICK[:-1]]) == 2
    assert capsys.readouterr().err.startswith(f"error: the command line needs {name}, which is not")
