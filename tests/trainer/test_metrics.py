import json
from pathlib import Path

import pytest
import torch

from float8_lab.device import Clock
from float8_lab.errors import ConfigError
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.metrics import (
    JsonLines,
    Metrics,
    StepRecord,
    ValidationRecord,
    read_metrics,
    summarize,
)
from support.trainer import stopped_clock


def record(step: int, loss: float = 1.0, seconds: float = 0.5, timed: bool = True) -> StepRecord:
    return StepRecord(step, loss, 0.1, 1e-3, seconds, 100, timed, 1000 + step)


def test_lines_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    records = [record(1, 2.5), record(2, float("nan"))]
    log.on_records(records)
    log.on_validation(ValidationRecord(2, float("inf")))
    log.on_end("finished", 2)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are no JSON.
    path.write_text(path.read_text().replace('"seconds"', '"mfu": 0.4, "seconds"'))  # as of 0.2.0
    back = read_metrics(path)
    assert back.train[0] == records[0]
    assert back.train[1].loss != back.train[1].loss
    assert back.validation == [ValidationRecord(2, float("inf"))]
    assert back.status == "finished"


@pytest.mark.parametrize(
    "line",
    [b"5", b"null", b"{}", b'{"kind": "end", "step": 1}', b"\xff{}", b"[" * 100_000]
    + [b'{"kind": "validation", "step": 1, "loss": %s}' % x for x in (b"null", b'"x"', b"[]")]
    + [b'{"kind": "train", "step": 1, "loss": 1.0}'],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(path).on_records([record(1)])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ConfigError, match=rf"{path}: .*\(number 2\).*delete that line"):
        read_metrics(path)


def test_steps_taken_again_after_a_resume_count_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    log.on_records([record(step, loss=10.0) for step in range(1, 6)])
    log.on_validation(ValidationRecord(4, 9.0))
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # Killed while writing.

    log = JsonLines(path)
    log.on_start(TrainConfig.create(), 3, "resumed")
    log.on_records([record(step, loss=20.0) for step in range(4, 7)])
    back = read_metrics(path)
    assert [r.step for r in back.train] == [1, 2, 3, 4, 5, 6]
    assert [r.loss for r in back.train] == [10.0] * 3 + [20.0] * 3
    assert back.validation == []


def test_summary_takes_the_median_past_warm_up() -> None:
    train = [record(step, loss=100.0 - step, seconds=9.0, timed=False) for step in range(1, 11)]
    train += [record(step, loss=100.0 - step, seconds=0.2) for step in range(11, 30)]
    train += [record(30, loss=70.0, seconds=50.0)]
    summary = summarize(Metrics(train, [ValidationRecord(10, 4.0), ValidationRecord(30, 3.0)]))
    assert summary["steps"] == 30
    assert summary["step_ms"] == 200
    assert summary["tokens_per_s"] == pytest.approx(500)
    assert summary["train_loss"] == pytest.approx((72 + 71 + 70) / 3)
    assert summary["val_loss"] == 3.0
    assert summary["peak_memory_bytes"] == 1030


def test_timer_measures_steps_and_not_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, timer = stopped_clock(monkeypatch), Clock(torch.device("cpu"))
    for _ in range(2):
        timer.mark()
        sleep(0.02)
        timer.mark()
        sleep(0.1)
    assert timer.collect()[::2] == pytest.approx([0.02, 0.02])
    assert timer.collect() == []
