"""The training loop end to end, with a model whose steps take milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from float8.convert import ConversionReport
from float8.convert.report import LayerReport
from float8.trainer import build, data, loop
from float8.trainer.checkpoint import check_checkpoint, list_checkpoints, read_tensors
from float8.trainer.config import TrainConfig
from float8.trainer.data import Corpus
from float8.trainer.errors import (
    CheckpointError,
    ConfigError,
    OutOfMemoryError,
    TrainingDivergedError,
)
from float8.trainer.interrupt import StopRequest
from float8.trainer.metrics import Observer, StepRecord, read_metrics
from float8.trainer.run_folder import find_checkpoint, saved_config
from float8.trainer.train import train

MakeConfig = Callable[..., TrainConfig]


class Listener(Observer):
    """Writes down what it is told, and can act on a step."""

    def __init__(self, act: Callable[[int], None] = lambda step: None) -> None:
        self.events: list[str] = []
        self.records: list[StepRecord] = []
        self._act = act

    def on_step(self, step: int) -> None:
        self._act(step)

    def on_records(self, records: Sequence[StepRecord]) -> None:
        self.records += records
        self.events.append(f"records to {records[-1].step}")

    def on_validation(self, record: object) -> None:
        self.events.append("validation")

    def on_checkpoint(self, path: Path) -> None:
        self.events.append(f"checkpoint {int(path.name[5:])}")

    def on_end(self, status: str, step: int) -> None:
        self.events.append(f"{status} {step}")

    def close(self) -> None:
        self.events.append("closed")


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


def test_accumulated_steps_equal_one_big_batch(make_config: MakeConfig, tmp_path: Path) -> None:
    big = train(make_config(output=str(tmp_path / "big"), batch_size=8, accumulate=1))
    small = train(make_config(output=str(tmp_path / "small"), batch_size=2, accumulate=4))
    one, other = (read_metrics(run.folder.metrics).train for run in (big, small))
    for a, b in zip(one, other, strict=True):
        assert a.tokens == b.tokens == 8 * 16
        assert a.loss == pytest.approx(b.loss, rel=2e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=2e-4)


def test_the_loss_falls_and_is_in_nats_per_byte(make_config: MakeConfig) -> None:
    result = train(make_config(steps=40, warmup_steps=4))
    losses = [record.loss for record in read_metrics(result.folder.metrics).train]
    assert losses[0] == pytest.approx(math.log(256), rel=0.15)
    assert result.summary.train_loss is not None
    assert result.summary.train_loss < losses[0] - 1.5
    assert result.summary.val_loss is not None
    assert abs(result.summary.val_loss - result.summary.train_loss) < 0.5


def test_first_loss_and_step_match_plain_torch(make_config: MakeConfig, corpus: Corpus) -> None:
    config = make_config(steps=2, warmup_steps=0, grad_clip=0.05)
    result = train(config)
    model, _ = loop.build_model(config, torch.device("cpu"))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step, record in enumerate(read_metrics(result.folder.metrics).train):
        tokens = data.train_batch(
            corpus.train, seed=0, first=4 * step, batch_size=4, seq_len=16
        ).long()
        log_odds = model(tokens[:, :-1]).log_softmax(-1)
        loss = -log_odds.gather(-1, tokens[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()  # type: ignore[union-attr]
        assert record.loss == pytest.approx(loss.item(), rel=1e-5)
        assert record.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        for parameter in model.parameters():
            parameter.grad *= min(0.05 / norm.item(), 1.0)  # type: ignore[operator]
        for group in optimizer.param_groups:
            group["lr"] = record.learning_rate
        optimizer.step()
    assert result.checkpoint is not None
    trained = read_tensors(result.checkpoint)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[f"model/{name}"], parameter.data, rtol=1e-4, atol=1e-6)


def test_validating_on_the_way_changes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    for recipe in ("high_precision", "delayed"):
        often, never = (
            train(
                make_config(recipe=recipe, output=str(tmp_path / f"{recipe}{n}"), eval_interval=n)
            )
            for n in (1, 0)
        )
        one, other = (read_metrics(run.folder.metrics) for run in (often, never))
        assert [r.loss for r in one.train] == [r.loss for r in other.train]
        assert (len(one.validation), len(other.validation)) == (6, 1)
        assert one.validation[-1] == other.validation[-1]


def test_bfloat16_keeps_float32_weights(make_config: MakeConfig) -> None:
    result = train(make_config(dtype="bfloat16", recipe="tensorwise"))
    assert result.checkpoint is not None
    weights = read_tensors(result.checkpoint)
    assert {value.dtype for name, value in weights.items() if "model/" in name} == {torch.float32}
    assert {v.dtype for name, v in weights.items() if "exp_avg" in name} == {torch.float32}
    assert result.summary.train_loss is not None
    assert result.summary.train_loss < 6


def test_observers_hear_everything_in_order(make_config: MakeConfig) -> None:
    listener = Listener()
    config = make_config(steps=5, eval_interval=3, checkpoint_interval=2, keep_checkpoints=2)
    result = train(config, observers=[listener])
    assert listener.events == [
        "records to 2",
        "checkpoint 2",
        "records to 3",
        "validation",
        "records to 4",
        "checkpoint 4",
        "records to 5",
        "validation",
        "checkpoint 5",
        "finished 5",
        "closed",
    ]
    assert [r.step for r in listener.records] == [1, 2, 3, 4, 5]
    assert [r.timed for r in listener.records] == [False, False, True, True, True]
    assert all(r.seconds > 0 for r in listener.records)
    kept = list_checkpoints(result.folder.checkpoints)
    assert [path.name for path in kept] == ["step_00000004", "step_00000005"]


def test_a_recipe_that_converts_nothing_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LayerReport("layers.0.attention.key", 32, 16, None, "needs a newer GPU")
    monkeypatch.setattr(build, "conversion_report", lambda model: ConversionReport((layer,)))
    with pytest.raises(ConfigError, match="'delayed' converted no layer: needs a newer GPU"):
        train(make_config(recipe="delayed"))
    train(make_config())  # The folder is not taken by a run that never started.


def test_a_request_to_stop_ends_after_the_step_with_a_checkpoint(make_config: MakeConfig) -> None:
    stop = StopRequest()

    def ask(step: int) -> None:
        stop.requested = step == 3

    listener = Listener(ask)
    result = train(make_config(), observers=[listener], stop=stop)
    assert (result.status, result.summary.steps) == ("interrupted", 3)
    assert listener.events[-3:] == ["checkpoint 3", "interrupted 3", "closed"]
    assert find_checkpoint(result.folder.path) == result.checkpoint


def test_a_used_folder_is_not_overwritten(make_config: MakeConfig) -> None:
    result = train(make_config())
    before = result.folder.metrics.read_text()
    with pytest.raises(ConfigError, match=r"already holds a run: continue it with --resume"):
        train(make_config())
    assert result.folder.metrics.read_text() == before


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
    data_file = next((newest / "data").glob("*.distcp"))
    with data_file.open("r+b") as file:
        file.truncate(data_file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"step_00000004 is damaged.*step_00000002"):
        train(saved_config(older), resume=result.folder.path)
    done = train(saved_config(older), resume=older)
    assert done.status == "finished"
    check_checkpoint(list_checkpoints(result.folder.checkpoints)[-1])


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
    assert caught.value.step == 4
    folder = Path(config.output)
    assert str(folder / "metrics.jsonl") in str(caught.value)
    assert [r.step for r in read_metrics(folder / "metrics.jsonl").train] == [1, 2, 3, 4]
    assert find_checkpoint(folder).name == "step_00000002"


def test_any_failure_keeps_the_steps_that_were_done(make_config: MakeConfig) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    listener = Listener(fail)
    config = make_config(log_interval=100)
    with pytest.raises(OutOfMemoryError, match="lower --batch-size"):
        train(config, observers=[listener])
    metrics = read_metrics(Path(config.output) / "metrics.jsonl")
    assert [r.step for r in metrics.train] == [1, 2, 3]
    assert metrics.status == "failed"
    assert listener.events[-2:] == ["failed 3", "closed"]


def test_tensorboard_events_are_written(make_config: MakeConfig) -> None:
    result = train(make_config(tensorboard=True))
    (events,) = result.folder.tensorboard.iterdir()
    content = events.read_bytes()
    assert b"loss/train" in content
    assert b"loss/validation" in content


def test_a_checkpoint_that_does_not_fit_the_model_is_refused(
    make_config: MakeConfig, corpus: Corpus
) -> None:
    result = train(make_config(stop_after=2))
    trainer = loop.Trainer(make_config(), corpus, result.folder)
    assert result.checkpoint is not None
    tensors = read_tensors(result.checkpoint)
    del tensors["model/norm.weight"]
    with pytest.raises(CheckpointError, match=r"does not fit the model: .*norm.weight"):
        loop.restore_state(tensors, trainer.model, trainer.optimizer, trainer.device)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "fp7"}, r"fp7.*tensorwise.*high_precision"),
        ({"model": "huge"}, "unknown model 'huge': choose one of tiny"),
        ({"dtype": "float16"}, "unknown dtype 'float16': choose one of float32, bfloat16"),
        ({"device": "banana"}, "unknown device 'banana'"),
        ({"device": "cuda:99"}, "is not there"),
        ({"device": "meta"}, "not supported"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"accumulate": 0}, "--accumulate must be at least 1"),
        ({"learning_rate": -1.0}, "--learning-rate must be more than 0"),
        ({"min_lr_ratio": 2.0}, "--min-lr-ratio must be between 0 and 1"),
        ({"vocab_size": 17}, "at least 256"),
        ({"colour": "red"}, "unknown settings: colour"),
    ],
)
def test_settings_that_cannot_work_are_named(
    make_config: MakeConfig, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**settings)


def test_settings_survive_json(make_config: MakeConfig) -> None:
    config = make_config(recipe="delayed", grad_clip=0.3)
    assert TrainConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="different version of float8: colour"):
        TrainConfig.from_dict({**config.to_dict(), "colour": "red"})
