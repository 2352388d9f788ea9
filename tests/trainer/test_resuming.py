"""Stopping a run and going on with it; its checkpoints."""

import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from float8_lab.errors import CheckpointError, ConfigError
from float8_lab.trainer import loop
from float8_lab.trainer.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.data import Corpus
from float8_lab.trainer.loop import train
from float8_lab.trainer.metrics import read_metrics
from float8_lab.trainer.run_folder import find_checkpoint, saved_config
from support.checkpoints import read_tensors

MakeConfig = Callable[..., TrainConfig]


def checkpoint_of(run: loop.Trainer) -> Path:
    assert run.last_checkpoint is not None
    return run.last_checkpoint


@pytest.mark.parametrize("recipe", ["high_precision", "tensorwise", "delayed"])
def test_resuming_is_exact_to_the_bit(make_config: MakeConfig, tmp_path: Path, recipe: str) -> None:
    settings = {"recipe": recipe, "steps": 8, "accumulate": 2, "eval_interval": 3}
    whole = train(make_config(output=str(tmp_path / "whole"), **settings))
    parts = make_config(output=str(tmp_path / "parts"), **settings)
    first = train(parts.replace(stop_after=4))
    assert first.status == "stopped"
    torch.manual_seed(999)  # Another process would not have the same random state.
    second = train(saved_config(checkpoint_of(first)), resume=first.last_checkpoint)
    assert (second.status, second.step) == ("finished", 8)

    expected, got = (read_tensors(checkpoint_of(run)) for run in (whole, second))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert any(name.startswith("optimizer/") and "exp_avg" in name for name in expected)
    if recipe == "delayed":
        assert any("amax_history" in name for name in expected)
    one, other = (read_metrics(run.folder.metrics) for run in (whole, second))
    assert [(r.loss, r.grad_norm) for r in one.train] == [
        (r.loss, r.grad_norm) for r in other.train
    ]
    assert one.validation == other.validation


def test_resuming_with_other_settings_or_data_is_refused(
    make_config: MakeConfig, text_folder: Path
) -> None:
    result = train(make_config(stop_after=2))
    changed = saved_config(checkpoint_of(result)).replace(learning_rate=0.5, recipe="tensorwise")
    with pytest.raises(ConfigError) as caught:
        train(changed, resume=result.last_checkpoint)
    assert "recipe was 'high_precision' and is now 'tensorwise'" in str(caught.value)
    assert "learning_rate was 0.005 and is now 0.5" in str(caught.value)
    (text_folder / "chapter00.txt").write_text("something else " * 50)
    with pytest.raises(ConfigError, match="the text of the data has changed"):
        train(saved_config(checkpoint_of(result)), resume=result.last_checkpoint)
    assert list_checkpoints(result.folder.checkpoints) == [result.last_checkpoint]


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
            trainer.restore(checkpoint_of(result))


def test_a_run_goes_on_on_another_device_of_its_kind(make_config: MakeConfig) -> None:
    # As one of cuda:1 must, where each of several ranks takes a GPU of its own.
    first = train(make_config(device="cpu:0", steps=2, stop_after=1))
    on_another = saved_config(checkpoint_of(first)).replace(device="cpu")
    assert train(on_another, resume=first.last_checkpoint).status == "finished"


def tensors() -> dict[str, torch.Tensor]:
    return {
        "model/a": torch.randn(5, 7),
        "model/scalar": torch.tensor(3.5),
        "model/half": torch.randn(4).bfloat16(),
        "rng/cpu": torch.get_rng_state(),
    }


def save(folder: Path, step: int, keep: int = 5) -> Path:
    return save_checkpoint(folder, step, tensors(), keep=keep)


def test_a_disk_that_fills_up_leaves_the_others(tmp_path: Path) -> None:
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


def test_an_unfinished_one_is_not_seen_and_cleared(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    leftover = tmp_path / ".unfinished-step_00000002"
    leftover.mkdir()
    (leftover / "half").write_text("x")
    assert list_checkpoints(tmp_path) == [first]
    second = save(tmp_path, 2)
    assert not leftover.exists()
    assert list_checkpoints(tmp_path) == [first, second]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("rest", [None, 100])
def test_damage_is_named(tmp_path: Path, name: str, rest: int | None) -> None:
    path = save(tmp_path, 1)
    if rest is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes((path / name).read_bytes()[:rest])
    with pytest.raises(CheckpointError, match=r"go on from the checkpoint .*step_00000001: \S"):
        load_checkpoint(path, tensors())


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="nothing to resume at"):
        find_checkpoint(tmp_path / "missing")
