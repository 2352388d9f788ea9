"""Runs that stop, fail and go on; their checkpoints, and that a folder is free for the next one."""

import json
import resource
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from float8.convert.report import ConversionReport, LayerReport
from float8_lab.errors import CheckpointError, ConfigError, FailedError
from float8_lab.trainer import build, checkpoint, loop
from float8_lab.trainer.checkpoint import check_checkpoint, list_checkpoints, save_checkpoint
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.data import Corpus
from float8_lab.trainer.loop import train
from float8_lab.trainer.metrics import read_metrics
from float8_lab.trainer.run_folder import RunFolder, find_checkpoint, saved_config
from sqnr import assert_same_bits
from support.rings import short
from support.trainer import Listener, read_tensors

MakeConfig = Callable[..., TrainConfig]


@pytest.mark.parametrize("recipe", short({"delayed"}, ["high_precision", "tensorwise", "delayed"]))
def test_resuming_is_exact_to_the_bit(make_config: MakeConfig, tmp_path: Path, recipe: str) -> None:
    settings = {"recipe": recipe, "steps": 8, "accumulate": 2, "eval_interval": 3}
    if recipe == "delayed":  # a tied head, and no limit
        settings |= {"model": "nano-tied", "grad_clip": 0.0}
    whole = train(make_config(output=str(tmp_path / "whole"), **settings))
    first = train(make_config(output=str(tmp_path / "parts"), stop_after=4, **settings))
    assert first.status == "stopped"
    torch.manual_seed(999)  # Another process would not have the same random state.
    second = train(saved_config(first.last_checkpoint), resume=first.last_checkpoint)
    assert (second.status, second.step) == ("finished", 8)

    expected, got = (read_tensors(run.last_checkpoint) for run in (whole, second))
    assert_same_bits(got, expected)
    assert any(name.startswith("optimizer/") and "exp_avg" in name for name in expected)
    assert any("amax_history" in name for name in expected) == (recipe == "delayed")
    one, other = (read_metrics(run.folder.metrics) for run in (whole, second))
    assert [(r.loss, r.grad_norm) for r in one.train] == [
        (r.loss, r.grad_norm) for r in other.train
    ]
    assert one.validation == other.validation


def test_resuming_with_other_settings_or_data_or_from_damage_is_refused(
    make_config: MakeConfig, text_folder: Path
) -> None:
    result = train(make_config(stop_after=2))
    config = saved_config(result.last_checkpoint)
    recipe, rate = "recipe was 'high_precision' and is now 'tensorwise'", "learning_rate was 0.005"
    with pytest.raises(ConfigError, match=f"{recipe}; {rate} and is now 0.5"):
        train(config.replace(learning_rate=0.5, recipe="tensorwise"), resume=result.last_checkpoint)
    (text_folder / "chapter00.txt").write_text("something else " * 50)
    with pytest.raises(ConfigError, match="the text of the data has changed"):
        train(config, resume=result.last_checkpoint)
    assert list_checkpoints(result.folder.checkpoints) == [result.last_checkpoint]
    flipped(result.last_checkpoint / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="no other checkpoint of the run is intact"):
        train(config, resume=result.last_checkpoint)


def test_a_finished_run_is_extended_along_the_longer_schedule(make_config: MakeConfig) -> None:
    # On another device of its kind.
    first = train(make_config(steps=3, device="cpu:0"))
    longer = saved_config(first.last_checkpoint).replace(steps=6, device="cpu")
    second = train(longer, resume=first.last_checkpoint)
    assert (second.status, second.step) == ("finished", 6)
    rates = [record.learning_rate for record in read_metrics(second.folder.metrics).train]
    assert rates[3:] == [build.learning_rate(step, longer) for step in (4, 5, 6)]
    assert saved_config(second.last_checkpoint).steps == 6
    with pytest.raises(ConfigError, match="steps was 6 and is now 4"):
        train(longer.replace(steps=4), resume=second.last_checkpoint)


def test_a_checkpoint_that_does_not_fit_the_model_is_refused(
    make_config: MakeConfig, corpus: Corpus
) -> None:
    result = train(make_config(stop_after=2))
    larger = loop.Trainer(make_config(model="nano-tied"), corpus)
    more = loop.Trainer(make_config(), corpus)
    more.model.register_module("extra", nn.Linear(1, 1))
    for trainer, problem in (
        (larger, "256, 32.* and current: .*259, 32.* for model.embedding.weight"),
        (more, "Missing key .*: model.extra"),
    ):
        with pytest.raises(
            CheckpointError, match=rf"from the checkpoint .*step_00000002: .*{problem}"
        ):
            trainer.restore(result.last_checkpoint)


def save(folder: Path, step: int, keep: int = 5) -> Path:
    tensors = {
        "model/a": torch.randn(5, 7),
        "model/scalar": torch.tensor(3.5),
        "model/half": torch.randn(4).bfloat16(),
        "rng/cpu": torch.get_rng_state(),
    }
    return save_checkpoint(folder, step, tensors, keep=keep)


def test_a_disk_that_fills_up_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-step_00000009").mkdir()  # of a process that was killed
    first = save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))  # a write ends in the middle
    try:
        with pytest.raises(CheckpointError, match=r"could not write .*step_00000002: .*too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == [first]


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"_00000001: \[Errno 28\] No .*; free some space"):
        save(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:50])


def flipped(file: Path) -> None:
    data = file.read_bytes()
    middle = len(data) // 2
    file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


@pytest.mark.parametrize("damage", [Path.unlink, cut, flipped])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "checksums.json"])
def test_damage_is_told_before_anything_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    good, path, empty = save(tmp_path, 1), save(tmp_path, 2), tmp_path / "step_00000003"
    empty.mkdir()
    (good / "notes.txt").write_text("not of the checkpoint")
    check_checkpoint(good)
    damage(path / name)
    for damaged in (path, empty):
        with pytest.raises(CheckpointError, match=r"is damaged: \S+ .*last good one") as caught:
            check_checkpoint(damaged)
        assert str(caught.value).endswith(f"--resume {good}")
    assert capfd.readouterr().err == ""
    flipped(good / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="no other checkpoint of the run is intact"):
        check_checkpoint(path)


def test_checksums_are_of_whole_files(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000  # several reads
    (tmp_path / "file").write_bytes(data)
    assert checkpoint._crc(tmp_path / "file") == zlib.crc32(data)


def test_checksums_that_say_nothing_of_a_file(tmp_path: Path) -> None:
    good, path = save(tmp_path, 1), save(tmp_path, 2)
    listed = json.loads((path / "checksums.json").read_text())
    del listed["__0_0.distcp"]
    (path / "checksums.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=rf"__0_0.distcp is not in check.*--resume {good}"):
        check_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("steps", value) for value in (None, [6], {}, float("nan"), "6", 6.5, -1, True)),
        ("learning_rate", "x"),
        ("data", 6.5),
        ("recipe", None),
    ],
)
def test_a_wrong_value_in_the_config_of_a_run(
    make_config: MakeConfig, name: str, value: object
) -> None:
    config = make_config()
    path = Path(config.output)
    path.mkdir()

    def read(text: str) -> TrainConfig:
        (path / "config.json").write_text(text)
        return saved_config(path / "checkpoints" / "step_00000001")

    saved = {"config": vars(config), "corpus": {"fingerprint": ""}}
    assert read(json.dumps(saved)) == config
    older = {key: value for key, value in vars(config).items() if key != "rounded_start"}
    with pytest.raises(ConfigError, match=r"of an older version, .* train it anew"):
        read(json.dumps({**saved, "config": older}))
    with pytest.raises(ConfigError, match=rf"from config.json .*{name}"):
        read(json.dumps({**saved, "config": vars(config) | {name: value}}))
    for text in ("[" * 100_000, '{"config": 3, "corpus": {}}'):
        with pytest.raises(ConfigError, match=r"from config.json"):
            read(text)


def test_folders_that_nothing_can_be_done_with(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    config = make_config()
    folder = Path(config.output)
    folder.mkdir()  # of a run that was killed or still runs
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"kind": "start", "step": 0, "time": 1.0}\n')
    with pytest.raises(ConfigError, match=r"holds a run: it has no checkpoint.*delete it"):
        train(config)
    metrics.unlink()
    train(config)
    before = metrics.read_text()
    with pytest.raises(ConfigError, match=r"already holds a run: continue it with --resume"):
        train(config)
    assert metrics.read_text() == before


def test_what_cannot_be_converted_takes_no_folder(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LayerReport("layers.0.attention.key", 32, 16, None, "needs a newer GPU")
    with monkeypatch.context() as patch:
        patch.setattr(build, "conversion_report", lambda model: ConversionReport((layer,)))
        with pytest.raises(ConfigError, match="'delayed' converted no layer: needs a newer GPU"):
            train(make_config(recipe="delayed"))
    monkeypatch.setattr(build, "lacks_float8_gemm", lambda device, **_: f"{device} is too old")
    with pytest.raises(ConfigError, match="recipe 'tensorwise': cpu is too old"):
        train(make_config(recipe="tensorwise"))
    train(make_config())  # The folder is not taken by a run that never started.


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was(
    make_config: MakeConfig, nan_at: Callable[[int], None]
) -> None:
    nan_at(4)
    config = make_config(checkpoint_interval=2, log_interval=5)
    with pytest.raises(FailedError, match=r"diverged at step 4: loss nan") as caught:
        train(config)
    folder = Path(config.output)
    assert str(folder / "metrics.jsonl") in str(caught.value)
    assert [r.step for r in read_metrics(folder / "metrics.jsonl").train] == [1, 2, 3, 4]
    assert find_checkpoint(folder).name == "step_00000002"


@pytest.mark.parametrize("how", [{}, {"final_checkpoint": False}, {"stop_after": 1}])
def test_weights_that_are_not_finite_are_never_a_finished_run(
    make_config: MakeConfig, how: dict[str, Any]
) -> None:
    """The loss of the last step is that of the weights before it."""
    steps = 2 if "stop_after" in how else 1
    config = make_config(steps=steps, warmup_steps=0, learning_rate=1e39, **how)
    with pytest.raises(FailedError, match=r"diverged at step 1: (validation loss|a weight is) nan"):
        train(config)
    folder = RunFolder(config.output)
    assert (folder.status, folder.saved) == ("failed", [])
    (step,) = read_metrics(folder.metrics).train
    assert step.loss + step.grad_norm < float("inf")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory"),
        RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904, 17]"),
        MemoryError(),
    ],
    ids=["GPU", "CPU", "size", "Python"],
)
def test_too_little_memory_says_what_to_do_and_frees_a_folder_without_checkpoints(
    make_config: MakeConfig, error: Exception
) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise error

    config, listener = make_config(recipe="delayed", log_interval=100), Listener(fail)
    with pytest.raises(FailedError, match="lower --batch-size"):
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
