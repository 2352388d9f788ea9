from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from float8_lab.errors import ConfigError
from float8_lab.trainer import loop
from float8_lab.trainer.compare import compare
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.metrics import (
    Metrics,
    Observer,
    StepRecord,
    ValidationRecord,
    read_metrics,
)
from float8_lab.trainer.plot import plot_comparison, smooth

MakeConfig = Callable[..., TrainConfig]


def load(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_report_has_the_numbers_of_the_runs(make_config: MakeConfig) -> None:
    config = make_config(steps=12, eval_interval=6)
    result = compare(config, ["tensorwise", "delayed"])
    output = Path(config.output)
    report = load(result.report)
    runs = report["runs"]
    assert [run["recipe"] for run in runs] == ["high_precision", "tensorwise", "delayed"]
    for run in runs:
        metrics = read_metrics(output / run["metrics"])
        assert run["status"] == metrics.status == "finished"
        assert run["steps"] == 12
        assert run["train_loss"] == metrics.train[-1].loss  # A tenth of 12 steps is one.
        assert run["val_loss"] == metrics.validation[-1].loss
        timed = sorted(r.seconds for r in metrics.train if r.timed)
        assert run["tokens_per_s"] == pytest.approx(64 / timed[len(timed) // 2])
        gap = run["val_loss"] - runs[0]["val_loss"]
        assert run["val_gap_nats"] == pytest.approx(gap, abs=1e-12)
        assert run["val_gap_percent"] == pytest.approx(100 * gap / runs[0]["val_loss"], abs=1e-9)
        assert run["train_gap_nats"] == run["train_loss"] - runs[0]["train_loss"]
        assert run["speedup"] == pytest.approx(run["tokens_per_s"] / runs[0]["tokens_per_s"])
        assert run["parameters"] == config.model_config().num_parameters
        assert run["peak_memory_bytes"] is None or run["peak_memory_bytes"] >= 0
        assert run["memory_note"]
        assert run["error"] is None
    assert runs[0]["val_gap_percent"] == 0
    assert runs[1]["val_gap_percent"] != 0
    assert report["environment"]["torch"] == torch.__version__
    assert report["settings"]["steps"] == 12
    assert report["corpus"]["train_files"] == 11
    assert not result.failed

    table = (output / "report.md").read_text()
    assert f"{runs[1]['val_loss']:.4f}" in table
    assert f"{runs[1]['val_gap_percent']:+.2f}" in table


def test_runs_see_the_same_data_from_the_same_start(make_config: MakeConfig) -> None:
    config = make_config(steps=2)
    result = compare(config, ["tensorwise"])
    first, second = (
        read_metrics(result.report.parent / row.recipe / "metrics.jsonl").train[0]
        for row in result.rows
    )
    assert first.loss != second.loss
    assert first.loss == pytest.approx(second.loss, rel=0.01)


def test_plot_shows_a_curve_per_run(make_config: MakeConfig) -> None:
    result = compare(make_config(steps=10), ["tensorwise"])
    assert result.plot == result.report.parent / "loss.png"
    image = np.asarray(Image.open(result.plot).convert("RGB")).astype(int)
    assert image.shape[0] > 800
    assert image.shape[1] > 1000
    upper, lower = np.split(image, [int(image.shape[0] * 0.58)])
    blue = [0x00, 0x72, 0xB2]
    for panel in (upper, lower):
        assert (np.abs(panel - blue).sum(-1) < 30).sum() > 100


def test_curves_that_coincide_are_all_seen(tmp_path: Path) -> None:
    run = Metrics(
        [StepRecord(n, 2.0 - n / 100, 1.0, 1e-3, 0.1, 64, True, None) for n in range(1, 101)],
        [ValidationRecord(n, 2.0 - n / 100) for n in (50, 100)],
    )
    names = ("high_precision", "tensorwise", "delayed", "third")
    plot_comparison(dict.fromkeys(names, run), "the same four times", tmp_path / "loss.png")
    image = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB")).astype(int)
    curve = image[int(image.shape[0] * 0.15) : int(image.shape[0] * 0.5), : image.shape[1] // 2]
    for color in ([0x00, 0x72, 0xB2], [0xD5, 0x5E, 0x00], [0x00, 0x9E, 0x73], [0xA3, 0xA3, 0xA3]):
        assert (np.abs(curve - color).sum(-1) < 30).sum() > 100


def test_differences_that_coincide_are_all_seen(tmp_path: Path) -> None:
    base, other = (
        Metrics([StepRecord(n, x * n, 1.0, 1e-3, 0.1, 64, True, None) for n in range(1, 101)], [])
        for x in (0.01, 0.02)
    )
    runs = {"high_precision": base, "tensorwise": other, "delayed": other, "third": other}
    plot_comparison(runs, "three alike", tmp_path / "loss.png")
    image = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB")).astype(int)
    lower = image[int(image.shape[0] * 0.6) :]
    for color in ([0x00, 0x72, 0xB2], [0xD5, 0x5E, 0x00], [0x00, 0x9E, 0x73]):
        assert (np.abs(lower - color).sum(-1) < 60).sum() > 300


def test_smoothing_is_a_running_mean() -> None:
    assert smooth(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1.0, 2.0, 4.0, 6.0]
    assert smooth(np.array([1.0, 3.0]), 1).tolist() == [1.0, 3.0]


def poison(monkeypatch: pytest.MonkeyPatch, at_call: int, problem: str) -> None:
    plain = loop.F.cross_entropy
    calls = 0

    def poisoned(*args: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls != at_call:
            return plain(*args)
        if problem == "nan":
            return plain(*args) * float("nan")
        raise RuntimeError("something broke\nat length")

    monkeypatch.setattr(loop.F, "cross_entropy", poisoned)


@pytest.mark.parametrize("problem", ["nan", "bug"])
def test_a_failing_run_leaves_the_others(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    # Each recipe is tried first. 4 steps and 2 validation batches per run: call 9 of the runs is
    # the third step of the second one.
    poison(monkeypatch, 3 + 9, problem)
    config = make_config(steps=4)
    result = compare(config, ["tensorwise", "delayed"])
    runs = load(result.report)["runs"]
    assert [run["status"] for run in runs] == ["finished", "failed", "finished"]
    assert [row.recipe for row in result.failed] == ["tensorwise"]
    assert runs[1]["val_loss"] is None
    assert runs[1]["val_gap_percent"] is None
    assert runs[2]["val_gap_percent"] is not None
    if problem == "nan":
        assert "diverged at step 3" in runs[1]["error"]
        assert runs[1]["train_loss"] is None
    else:
        assert runs[1]["error"].startswith("RuntimeError: something broke (traceback in ")
        details = (Path(config.output) / "tensorwise" / "error.txt").read_text()
        assert "at length" in details
        assert "Traceback" in details
    assert result.plot is not None


def test_an_interrupted_comparison_goes_on_where_it_was(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(steps=6, final_checkpoint=False)
    whole = compare(config.replace(output=str(tmp_path / "whole")), ["tensorwise", "delayed"])

    stop = Event()

    class StopAt3(Observer):
        def on_start(self, run: loop.Trainer) -> None:
            self.recipe = run.config.recipe

        def on_step(self, step: int) -> None:
            if step == 3 and self.recipe == "tensorwise":
                stop.set()

    half = compare(config, ["tensorwise", "delayed"], [StopAt3()], stop=stop)
    assert half.interrupted
    assert [row.status for row in half.rows] == ["finished", "interrupted"]
    assert half.rows[1].val_gap_percent is None
    with pytest.raises(ConfigError, match="already holds a comparison"):
        compare(config, ["tensorwise", "delayed"])
    with pytest.raises(ConfigError, match="learning_rate was"):
        compare(config.replace(learning_rate=1.0), ["tensorwise", "delayed"], resume=True)

    rest = compare(config, ["tensorwise", "delayed"], resume=True)
    assert [row.status for row in rest.rows] == ["finished"] * 3
    for resumed, straight in zip(rest.rows, whole.rows, strict=True):
        assert resumed.val_loss == straight.val_loss
        assert resumed.train_loss == straight.train_loss
    assert load(rest.report)["runs"][1]["steps"] == 6


def test_overwriting_starts_from_nothing(make_config: MakeConfig) -> None:
    config = make_config(steps=3)
    first = compare(config, ["tensorwise"])
    again = compare(config.replace(steps=4), ["tensorwise"], overwrite=True)
    assert [row.steps for row in again.rows] == [4, 4]
    assert first.report == again.report
    metrics = read_metrics(Path(config.output) / "tensorwise" / "metrics.jsonl")
    assert len(metrics.train) == 4


def test_recipes_are_checked_before_anything_runs(make_config: MakeConfig) -> None:
    config = make_config()
    with pytest.raises(ConfigError, match="fp7"):
        compare(config, ["tensorwise", "fp7"])
    with pytest.raises(ConfigError, match="named twice"):
        compare(config, ["tensorwise", "tensorwise"])
    assert not Path(config.output).exists()


def test_high_precision_is_first_and_once(make_config: MakeConfig) -> None:
    result = compare(make_config(steps=1), ["tensorwise", "high_precision"])
    assert [row.recipe for row in result.rows] == ["high_precision", "tensorwise"]
    assert all(row.val_loss is not None and math.isfinite(row.val_loss) for row in result.rows)


def test_resuming_over_a_damaged_file_says_what_to_do(make_config: MakeConfig) -> None:
    config = make_config(steps=1)
    compare(config, ["tensorwise"])
    file = Path(config.output) / "tensorwise" / "config.json"
    for content in ("", "{", "[]", "{}", '{"config": 3, "corpus": {}}', None):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        with pytest.raises(ConfigError, match="cannot read") as caught:
            compare(config, ["tensorwise"], resume=True)
        for part in (file.name, str(file.parent), "delete"):
            assert part in str(caught.value)


def test_a_result_without_its_config_corpus_is_damaged(make_config: MakeConfig) -> None:
    config = make_config(steps=1)
    compare(config, ["tensorwise"])
    file = Path(config.output) / "tensorwise" / "config.json"
    saved = load(file)
    del saved["corpus"]
    file.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"cannot read the settings .*no 'corpus'.*delete"):
        compare(config, ["tensorwise"], resume=True)
    shutil.rmtree(file.parent)  # as the message says
    assert compare(config, ["tensorwise"], resume=True).rows[1].status == "finished"
