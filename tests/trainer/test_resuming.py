"""Stopping a run and going on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

from float8_lab.errors import (
    CheckpointError,
    ConfigError,
)
from float8_lab.trainer import loop
from float8_lab.trainer.checkpoint import check_checkpoint, list_checkpoints
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.data import Corpus
from float8_lab.trainer.loop import train
from float8_lab.trainer.metrics import read_metrics
from float8_lab.trainer.run_folder import find_checkpoint, saved_config
from support.checkpoints import read_tensors
from support.listener import Listener

MakeConfig = Callable[..., TrainConfig]


@pytest.mark.parametrize("recipe", ["high_precision", "tensorwise", "delayed"])
def test_resuming_is_exact_to_the_bit(make_config: MakeConfig, tmp_path: Path, recipe: str) -> None:
    settings = {"recipe": recipe, "steps": 8, "accumulate": 2, "eval_interval": 3}
    whole = train(make_config(output=str(tmp_path / "whole"), **settings))
    parts = make_config(output=str(tmp_path / "parts"), **settings)
    first = train(parts.replace(stop_after=4))
    assert first.status == "stopped"
    assert first.checkpoint is not None
    torch.manual_seed(999)  # Another process would not have the same random state.
    second = train(saved_config(first.checkpoint), resume=Path(parts.output))
    assert (second.status, second.summary.steps) == ("finished", 8)

    assert whole.checkpoint is not None
    assert second.checkpoint is not None
    expected, got = read_tensors(whole.checkpoint), read_tensors(second.checkpoint)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert any(name.startswith("optimizer/") and "exp_avg" in name for name in expected)
    if recipe == "delayed":
        assert any("amax_history" in name for name in expected)

    def losses(result: loop.Trainer) -> list[tuple[float, float]]:
        metrics = read_metrics(result.folder.metrics)
        return [(r.loss, r.grad_norm) for r in metrics.train]

    assert losses(second) == losses(whole)  # type: ignore[arg-type]
    assert second.summary.val_loss == whole.summary.val_loss


def test_a_run_that_is_done_does_not_go_on_elsewhere(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    done = train(make_config(steps=2))
    assert done.checkpoint is not None
    other = saved_config(done.checkpoint).replace(output=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"is of the last of 2 steps: nothing is left to train"):
        train(other, resume=done.checkpoint)
    assert not (tmp_path / "other").exists()
    assert train(saved_config(done.checkpoint), resume=done.checkpoint).status == "finished"


def test_a_request_to_stop_ends_after_the_step_with_a_checkpoint(make_config: MakeConfig) -> None:
    stop = Event()

    def ask(step: int) -> None:
        if step == 3:
            stop.set()

    listener = Listener(ask)
    result = train(make_config(), observers=[listener], stop=stop)
    assert (result.status, result.summary.steps) == ("interrupted", 3)
    assert listener.events[-2:] == ["checkpoint 3", "interrupted 3"]
    assert find_checkpoint(result.folder.path) == result.checkpoint


def test_resuming_with_other_settings_or_data_is_refused(
    make_config: MakeConfig, text_folder: Path
) -> None:
    result = train(make_config(stop_after=2))
    folder = result.folder.path
    assert result.checkpoint is not None
    changed = saved_config(result.checkpoint).replace(learning_rate=0.5, recipe="tensorwise")
    with pytest.raises(ConfigError) as caught:
        train(changed, resume=folder)
    assert "recipe was 'high_precision' and is now 'tensorwise'" in str(caught.value)
    assert "learning_rate was 0.005 and is now 0.5" in str(caught.value)
    (text_folder / "chapter00.txt").write_text("something else " * 50)
    with pytest.raises(ConfigError, match="the text of the data has changed"):
        train(saved_config(result.checkpoint), resume=folder)
    assert list_checkpoints(result.folder.checkpoints) == [result.checkpoint]


def test_a_damaged_checkpoint_is_refused_and_the_older_one_works(make_config: MakeConfig) -> None:
    result = train(make_config(checkpoint_interval=2, stop_after=4))
    older, newest = list_checkpoints(result.folder.checkpoints)
    data_file = next(newest.glob("*.distcp"))
    with data_file.open("r+b") as file:
        file.truncate(data_file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"step_00000004 is damaged.*step_00000002"):
        train(saved_config(older), resume=result.folder.path)
    done = train(saved_config(older), resume=older)
    assert done.status == "finished"
    check_checkpoint(list_checkpoints(result.folder.checkpoints)[-1])


def test_a_checkpoint_that_does_not_fit_the_model_is_refused(
    make_config: MakeConfig, corpus: Corpus
) -> None:
    result = train(make_config(stop_after=2))
    assert result.checkpoint is not None
    larger = loop.Trainer(make_config(vocab_size=300), corpus)
    more = loop.Trainer(make_config(), corpus)
    more.model.register_module("extra", nn.Linear(1, 1))
    for trainer, problem in (
        (larger, "256, 32.* and current: .*300, 32.* for model.embedding.weight"),
        (more, "Missing key .*: model.extra"),
    ):
        with pytest.raises(
            CheckpointError, match=rf"from the checkpoint .*step_00000002: .*{problem}"
        ):
            trainer.restore(result.checkpoint)


def test_a_run_stopped_before_its_first_step_goes_on_as_a_new_one(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    stop = Event()
    stop.set()
    first = train(make_config(), stop=stop)
    assert (first.status, first.summary.steps) == ("interrupted", 0)
    assert first.checkpoint is not None
    resumed = train(saved_config(first.checkpoint), resume=first.checkpoint)
    whole = train(make_config(output=str(tmp_path / "whole")))
    assert [r.loss for r in read_metrics(resumed.folder.metrics).train] == [
        r.loss for r in read_metrics(whole.folder.metrics).train
    ]


def test_a_run_goes_on_on_another_device_of_its_kind(make_config: MakeConfig) -> None:
    # As one of cuda:1 must, where each of several ranks takes a GPU of its own.
    first = train(make_config(device="cpu:0", steps=2, stop_after=1))
    assert first.checkpoint is not None
    on_another = saved_config(first.checkpoint).replace(device="cpu")
    assert train(on_another, resume=first.checkpoint).status == "finished"
