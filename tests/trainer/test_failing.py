"""Runs that fail: what is kept, and that the folder is free for the next one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from float8.convert import ConversionReport
from float8.convert.report import LayerReport
from float8_lab.errors import ConfigError, OutOfMemoryError, TrainingDivergedError
from float8_lab.trainer import build, loop
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.loop import train
from float8_lab.trainer.metrics import read_metrics
from float8_lab.trainer.run_folder import find_checkpoint
from support.listener import Listener

MakeConfig = Callable[..., TrainConfig]


def test_a_recipe_that_converts_nothing_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LayerReport("layers.0.attention.key", 32, 16, None, "needs a newer GPU")
    monkeypatch.setattr(build, "conversion_report", lambda model: ConversionReport((layer,)))
    with pytest.raises(ConfigError, match="'delayed' converted no layer: needs a newer GPU"):
        train(make_config(recipe="delayed"))
    train(make_config())  # The folder is not taken by a run that never started.


def test_a_used_folder_is_not_overwritten(make_config: MakeConfig) -> None:
    result = train(make_config())
    before = result.folder.metrics.read_text()
    with pytest.raises(ConfigError, match=r"already holds a run: continue it with --resume"):
        train(make_config())
    assert result.folder.metrics.read_text() == before


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loop.F.cross_entropy
    calls = 0

    def poisoned(*args: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return plain(*args) * (float("nan") if calls == 4 else 1.0)

    monkeypatch.setattr(loop.F, "cross_entropy", poisoned)
    config = make_config(checkpoint_interval=2, log_interval=5)
    with pytest.raises(TrainingDivergedError, match=r"diverged at step 4: loss nan") as caught:
        train(config)
    folder = Path(config.output)
    assert str(folder / "metrics.jsonl") in str(caught.value)
    assert [r.step for r in read_metrics(folder / "metrics.jsonl").train] == [1, 2, 3, 4]
    assert find_checkpoint(folder).name == "step_00000002"


def failing_at(step: int) -> Listener:
    def fail(now: int) -> None:
        if now == step:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return Listener(fail)


def test_a_run_that_failed_before_its_first_checkpoint_frees_the_folder(
    make_config: MakeConfig,
) -> None:
    config, listener = make_config(recipe="delayed", log_interval=100), failing_at(3)
    with pytest.raises(OutOfMemoryError, match="lower --batch-size"):
        train(config, observers=[listener])
    assert listener.events[-1] == "failed 3"
    path = Path(config.output) / "metrics.jsonl"
    metrics = read_metrics(path)
    assert ([r.step for r in metrics.train], metrics.status) == ([1, 2, 3], "failed")
    before = path.read_text()
    assert train(config.replace(recipe="high_precision")).step == config.steps
    assert path.read_text().startswith(before)  # nothing is lost
    assert [r.step for r in read_metrics(path).train] == [1, 2, 3, 4, 5, 6]
    assert not (Path(config.output) / "conversion.txt").exists()
    with pytest.raises(ConfigError, match="already holds a run"):
        train(config)


def test_a_run_that_was_killed_or_still_runs_keeps_the_folder(make_config: MakeConfig) -> None:
    config = make_config()
    folder = Path(config.output)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"kind": "start", "step": 0, "time": 1.0}\n')
    with pytest.raises(ConfigError, match=r"holds a run: it has no checkpoint.*delete it"):
        train(config)


def test_a_failure_is_on_record_even_if_the_device_answers_no_more(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(self: loop.Trainer) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(loop.Trainer, "_report", dead)
    config = make_config()
    with pytest.raises(RuntimeError, match="device-side assert"):
        train(config)
    assert read_metrics(Path(config.output) / "metrics.jsonl").status == "failed"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory"),
        RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904, 17]"),
        MemoryError(),
    ],
)
def test_too_much_for_the_memory_of_the_cpu_says_what_to_do(
    make_config: MakeConfig, error: Exception
) -> None:
    def fail(step: int) -> None:
        raise error

    with pytest.raises(OutOfMemoryError, match="lower --batch-size"):
        train(make_config(), observers=[Listener(fail)])


def test_a_device_without_float8_gemms_is_refused_before_anything_runs(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "lacks_float8_gemm", lambda device: f"{device} is too old")
    with pytest.raises(ConfigError, match="recipe 'tensorwise': cpu is too old"):
        train(make_config(recipe="tensorwise"))
    train(make_config(recipe="high_precision", output=make_config().output + "-plain"))
