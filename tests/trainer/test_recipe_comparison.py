import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from float8_lab.errors import ConfigError
from float8_lab.trainer import loop
from float8_lab.trainer.compare import compare
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.metrics import read_metrics
from support.trainer import Listener

MakeConfig = Callable[..., TrainConfig]


def load(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.exhaustive
def test_report_has_the_numbers_of_the_runs(make_config: MakeConfig) -> None:
    config = make_config(steps=12, eval_interval=6)
    rows = compare(config, ["tensorwise", "high_precision", "delayed"])
    output = Path(config.output)
    report = load(output / "report.json")
    runs = report["runs"]
    assert runs == rows
    assert [run["recipe"] for run in runs] == ["high_precision", "tensorwise", "delayed"]
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
        gap = run["val_loss"] - runs[0]["val_loss"]
        assert run["val_gap_nats"] == pytest.approx(gap, abs=1e-12)
        assert run["val_gap_percent"] == pytest.approx(100 * gap / runs[0]["val_loss"], abs=1e-9)
        assert run["speedup"] == pytest.approx(run["tokens_per_s"] / runs[0]["tokens_per_s"])
        assert run["peak_memory_bytes"] is None
        assert run["error"] is None
    # The same data from the same start.
    assert firsts[0] != firsts[1] == pytest.approx(firsts[0], rel=0.01)
    assert runs[0]["val_gap_percent"] == 0 != runs[1]["val_gap_percent"]
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
    runs = compare(config, ["tensorwise", "delayed"])
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
    whole = compare(config.replace(output=str(tmp_path / "whole")), ["delayed"])

    stop, steps = Event(), itertools.count(1)
    listener = Listener(lambda step: next(steps) == 3 + 2 and stop.set())  # the second run's 2nd
    half = compare(config, ["delayed"], [listener], stop=stop)
    assert [row["status"] for row in half] == ["finished", "interrupted"]
    assert half[1]["val_gap_percent"] is None
    with pytest.raises(ConfigError, match="already holds a comparison"):
        compare(config, ["delayed"])
    with pytest.raises(ConfigError, match="learning_rate was"):
        compare(config.replace(learning_rate=1.0), ["delayed"], resume=True)
    with pytest.raises(ConfigError, match="holds runs of delayed: name these recipes, too"):
        compare(config, ["tensorwise"], resume=True)

    rest = compare(config, ["delayed"], resume=True)
    assert [row["status"] for row in rest] == ["finished"] * 2
    for name in ("val_loss", "train_loss"):
        assert [row[name] for row in rest] == [row[name] for row in whole]
    assert load(Path(config.output) / "report.json")["runs"] == rest

    again = compare(config.replace(steps=1), ["delayed"], overwrite=True)
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
    compare(config, ["tensorwise"])
    run = Path(config.output) / "tensorwise"
    file = run / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=rf"(?s)cannot read.*{run}.*not touched") as caught:
        compare(config, ["tensorwise"], resume=True)
    assert "delete" not in str(caught.value)
    elsewhere = run.parent.with_name("elsewhere")  # as the message says
    loop.train(config.replace(recipe="tensorwise", output=str(elsewhere), stop_after=1))
    shutil.copy(elsewhere / "config.json", file)
    assert compare(config, ["tensorwise"], resume=True)[1]["status"] == "finished"
    file.unlink()
    shutil.rmtree(run / "checkpoints")  # nothing is lost now
    with pytest.raises(ConfigError, match=rf"(?s)cannot read.*{run}.*delete"):
        compare(config, ["tensorwise"], resume=True)
    shutil.rmtree(run)
    assert compare(config, ["tensorwise"], resume=True)[1]["status"] == "finished"
