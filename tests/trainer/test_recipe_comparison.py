import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from float8_lab.cli.progress import ConsoleProgress
from float8_lab.errors import ConfigError
from float8_lab.trainer.checkpoint import list_checkpoints
from float8_lab.trainer.compare import add_gaps, by_recipe, compare
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.metrics import read_metrics
from support.trainer import Listener

MakeConfig = Callable[..., TrainConfig]


def load(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.exhaustive
def test_report_has_the_numbers_of_the_runs(make_config: MakeConfig) -> None:
    config = make_config(steps=12, eval_interval=6)
    compared = compare(config, ["tensorwise", "high_precision", "delayed"])
    output = Path(config.output)
    report = load(output / "report.json")
    assert report == compared
    runs = report["runs"]
    names = ["high_precision", "high_precision", "tensorwise", "delayed"]
    assert [run["recipe"] for run in runs] == names
    assert [run["rounded_start"] for run in runs] == [False, True, False, False]
    base = (runs[0]["val_loss"] + runs[1]["val_loss"]) / 2
    firsts = []
    for run in runs:
        metrics = read_metrics(output / run["metrics"])
        firsts.append(metrics.train[0].loss)
        assert run["status"] == metrics.status == "finished"
        assert run["steps"] == 12
        assert run["train_loss"] == metrics.train[-1].loss  # A tenth of 12 steps is one.
        assert run["val_loss"] == metrics.validation[-1].loss
        timed = sorted(r.seconds for r in metrics.train if r.timed)
        assert run["tokens_per_s"] == pytest.approx(64 / timed[len(timed) // 2])
        gap = run["val_loss"] - base
        assert run["val_gap_nats"] == pytest.approx(gap, abs=1e-12)
        assert run["val_gap_percent"] == pytest.approx(100 * gap / base, abs=1e-9)
        assert run["peak_memory_bytes"] is None
        assert run["error"] is None
    # The same data from the same start, but for its roundings.
    assert firsts[0] != firsts[1] == pytest.approx(firsts[0], rel=0.02)
    assert firsts[0] != firsts[2] == pytest.approx(firsts[0], rel=0.01)
    recipes = report["recipes"]
    assert [row["recipe"] for row in recipes] == list(dict.fromkeys(names))
    assert [row["runs"] for row in recipes] == [2, 1, 1]
    noise = 100 * abs(runs[0]["val_loss"] - runs[1]["val_loss"]) / base
    for row, run in zip(recipes[1:], runs[2:], strict=True):
        assert 0 < row["noise_percent"] == pytest.approx(noise)
        assert row["val_gap_percent"] == run["val_gap_percent"]
        assert row["gap_error_percent"] is None  # of one seed nothing is known
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / recipes[0]["tokens_per_s"])
    assert report["environment"]["torch"] == torch.__version__
    assert report["settings"]["steps"] == 12
    assert report["corpus"]["train_files"] == 11


def test_a_run_that_diverges_leaves_the_others(
    make_config: MakeConfig, nan_at: Callable[[int], None]
) -> None:
    # Each recipe is tried first. 4 steps and 2 validation batches per run: call 9 of the runs is
    # the third step of the second one.
    nan_at(3 + 9)
    config = make_config(steps=4)
    runs = compare(config, ["tensorwise", "delayed"], noise=False)["runs"]
    assert runs == load(Path(config.output) / "report.json")["runs"]
    assert [run["status"] for run in runs] == ["finished", "failed", "finished"]
    assert "diverged at step 3" in runs[1]["error"]
    assert runs[1]["train_loss"] is runs[1]["val_loss"] is runs[1]["val_gap_percent"] is None
    assert runs[2]["val_gap_percent"] is not None
    assert (Path(config.output) / "loss.png").exists()


@pytest.mark.exhaustive
def test_an_interrupted_comparison_goes_on_where_it_was(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(steps=3, final_checkpoint=False)
    once: Any = {"noise": False}
    whole = compare(config.replace(output=str(tmp_path / "whole")), ["delayed"], **once)["runs"]

    stop, steps = Event(), itertools.count(1)
    listener = Listener(lambda step: next(steps) == 3 + 2 and stop.set())  # the second run's 2nd
    half = compare(config, ["delayed"], [listener], stop=stop, **once)["runs"]
    assert [row["status"] for row in half] == ["finished", "interrupted"]
    assert half[1]["val_gap_percent"] is None
    with pytest.raises(ConfigError, match="already holds a comparison"):
        compare(config, ["delayed"], **once)
    with pytest.raises(ConfigError, match="learning_rate was"):
        compare(config.replace(learning_rate=1.0), ["delayed"], resume=True, **once)
    with pytest.raises(ConfigError, match=r"holds runs of delayed: name these recipes .* too"):
        compare(config, ["tensorwise"], resume=True, **once)

    rest = compare(config, ["delayed"], resume=True, **once)["runs"]
    assert [row["status"] for row in rest] == ["finished"] * 2
    for name in ("val_loss", "train_loss"):
        assert [row[name] for row in rest] == [row[name] for row in whole]
    assert load(Path(config.output) / "report.json")["runs"] == rest

    more = compare(config, ["delayed"], resume=True, repeats=2)  # the noise, and a seed
    assert [row["val_loss"] for row in more["runs"][:3:2]] == [row["val_loss"] for row in whole]
    assert [(row["seed"], row["rounded_start"]) for row in more["runs"]] == [
        (0, False), (0, True), (0, False), (1, False), (1, True), (1, False),
    ]  # fmt: skip

    again = compare(config.replace(steps=1), ["delayed"], overwrite=True, **once)["runs"]
    assert [row["steps"] for row in again] == [1, 1]
    metrics = read_metrics(Path(config.output) / "delayed" / "metrics.jsonl")
    assert len(metrics.train) == 1


def test_recipes_are_checked_before_anything_runs(make_config: MakeConfig) -> None:
    config = make_config()
    with pytest.raises(ConfigError, match="fp7"):
        compare(config, ["tensorwise", "fp7"])
    with pytest.raises(ConfigError, match="named twice"):
        compare(config, ["tensorwise", "tensorwise"])
    assert not Path(config.output).exists()


@pytest.mark.exhaustive
def test_resuming_over_a_damaged_file_says_what_to_do(make_config: MakeConfig) -> None:
    config = make_config(steps=1)
    compare(config, ["tensorwise"], noise=False)
    run = Path(config.output) / "tensorwise"
    file = run / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=rf"(?s)cannot read.*{run}.*train it anew"):
        compare(config, ["tensorwise"], resume=True, noise=False)
    shutil.rmtree(run)
    assert (
        compare(config, ["tensorwise"], resume=True, noise=False)["runs"][1]["status"] == "finished"
    )


def test_rows_of_recipes_have_standard_errors_of_gaps_and_the_noise() -> None:
    names = "high_precision", "high_precision", "rowwise"
    losses = {0: (1.0, 1.02, 1.03), 1: (2.0, 2.0, 2.04), 2: (3.0, 2.94, 3.09)}
    runs: list[dict[str, Any]] = [
        {"recipe": recipe, "seed": seed, "status": "finished", "val_loss": loss, "error": None,
         "steps": 3, "train_loss": loss, "tokens_per_s": speed, "step_ms": None,
         "peak_memory_bytes": None}
        for seed, three in losses.items()
        for recipe, loss, speed in zip(names, three, (4.0, 4.0, 6.0), strict=True)
    ]  # fmt: skip
    add_gaps(runs)
    base, rowwise = by_recipe(runs)
    gaps = [100 * (1.03 / 1.01 - 1), 2.0, 100 * (3.09 / 2.97 - 1)]
    assert [run["val_gap_percent"] for run in runs[2::3]] == pytest.approx(gaps)
    assert rowwise["val_gap_percent"] == pytest.approx(sum(gaps) / 3)
    assert rowwise["gap_error_percent"] == pytest.approx(statistics.stdev(gaps) / 3**0.5)
    apart = [100 * 0.02 / 1.01, 0.0, 100 * 0.06 / 2.97]
    assert rowwise["noise_percent"] == pytest.approx((sum(x * x for x in apart) / 3) ** 0.5)
    assert (rowwise["speedup"], rowwise["runs"], base["runs"]) == (1.5, 3, 6)
    assert base["val_gap_percent"] == pytest.approx(0.0)
    assert base["gap_error_percent"] is None
    failed = by_recipe([*runs[:2], {**runs[2], "status": "failed", "error": "diverged"}])[1]
    assert (failed["status"], failed["error"]) == ("failed", "diverged")


@pytest.mark.exhaustive
def test_runs_in_processes_of_their_own_are_the_same_and_end_with_the_comparison(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(model="tiny", steps=3, seq_len=16, batch_size=2, eval_batches=1)
    config = config.replace(final_checkpoint=False, threads=1)
    here = compare(config, ["tensorwise"])["runs"]
    at_once = config.replace(output=str(tmp_path / "at once"))
    there = compare(at_once, ["tensorwise"], [ConsoleProgress()], at_once=2)["runs"]
    assert [row["val_loss"] for row in there] == [row["val_loss"] for row in here]

    words = f"compare tensorwise rowwise --data {config.data} --model tiny --device cpu"
    words += (
        f" --seq-len 16 --steps 100000 --log-interval 1 --at-once 2 --output {tmp_path / 'long'}"
    )
    with subprocess.Popen(
        [sys.executable, "-um", "float8_lab.cli.main", *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "rounded:   step" in line:  # both are under way
                break
        os.kill(process.pid, signal.SIGTERM)  # a job in the background ignores SIGINT
        rest = process.stdout.read()  # until none of its processes is left, which have it open
    assert process.returncode == 130, rest
    assert "interrupted: go on with the same command and --resume" in rest
    begun = {path.parent.name for path in (tmp_path / "long").glob("*/metrics.jsonl")}
    assert begun == {"high_precision", "high_precision-rounded"}
    for name in begun:
        assert list_checkpoints(tmp_path / "long" / name / "checkpoints")
