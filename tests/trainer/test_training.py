"""The training loop end to end, with a model whose steps take milliseconds; and on a GPU.

Settings: what cannot work is named; where a result was made.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from float8 import Float8LinearRecipeName, Float8Weights
from float8_lab.errors import ConfigError
from float8_lab.trainer import build, data, environment
from float8_lab.trainer.build import learning_rate
from float8_lab.trainer.checkpoint import list_checkpoints
from float8_lab.trainer.compare import compare
from float8_lab.trainer.config import RECIPES, TrainConfig
from float8_lab.trainer.data import Corpus
from float8_lab.trainer.environment import describe_environment, git_commit
from float8_lab.trainer.loop import train
from float8_lab.trainer.metrics import read_metrics
from support.microbatches import layers_of
from support.trainer import Listener, read_tensors

MakeConfig = Callable[..., TrainConfig]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_weights_are_held_in_float8_while_microbatches_accumulate(
    make_config: MakeConfig, recipe: str
) -> None:
    held, on_the_fly = Float8Weights.HELD, Float8Weights.ON_THE_FLY
    for how, accumulate, wanted in (("", 2, held), ("", 1, on_the_fly), ("+held", 1, held)):
        config = make_config(recipe=recipe + how, accumulate=accumulate)
        model, _ = build.build_model(config, torch.device("cpu"))
        assert len(layers := layers_of(model)) == 7
        assert {layer.config.float8_weights for layer in layers} == {wanted}


def nats_per_byte(model: nn.Module, tokens: Tensor) -> Tensor:
    log_odds = model(tokens[:, :-1]).log_softmax(-1)
    return -log_odds.gather(-1, tokens[:, 1:, None]).mean()


def test_losses_and_steps_match_plain_torch(make_config: MakeConfig, corpus: Corpus) -> None:
    config = make_config(steps=2, accumulate=2, warmup_steps=0, grad_clip=0.05)
    result = train(config)
    model, _ = build.build_model(config, torch.device("cpu"))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step, record in enumerate(read_metrics(result.folder.metrics).train):
        batch = data.train_batch(corpus.train, seed=0, first=8 * step, batch_size=8, seq_len=16)
        loss = nats_per_byte(model, batch.long())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()  # type: ignore[union-attr]
        assert record.tokens == 8 * 16
        assert record.loss == pytest.approx(loss.item(), rel=1e-5)
        assert record.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        for parameter in model.parameters():
            parameter.grad *= min(0.05 / norm.item(), 1.0)  # type: ignore[operator]
        for group in optimizer.param_groups:
            group["lr"] = record.learning_rate
        optimizer.step()
    trained = read_tensors(result.last_checkpoint)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[f"model/{name}"], parameter.data, rtol=1e-4, atol=1e-6)
    batches = data.validation_batches(corpus.validation, batches=2, batch_size=4, seq_len=16)
    losses = [nats_per_byte(model, batch.long()).item() for batch in batches]
    (validation,) = read_metrics(result.folder.metrics).validation
    assert validation.loss == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_validating_on_the_way_changes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    often = make_config(recipe="delayed", output=str(tmp_path / "often"), eval_interval=1)
    never = make_config(recipe="delayed", output=str(tmp_path / "never"))
    one, other = (read_metrics(train(config).folder.metrics) for config in (often, never))
    assert [r.loss for r in one.train] == [r.loss for r in other.train]
    assert (len(one.validation), len(other.validation)) == (6, 1)
    assert one.validation[-1] == other.validation[-1]


def test_bfloat16_keeps_float32_weights(make_config: MakeConfig) -> None:
    result = train(make_config(dtype="bfloat16", recipe="tensorwise", tensorboard=True))
    saved = read_tensors(result.last_checkpoint).items()
    for kind in ("model/", "exp_avg"):
        assert {value.dtype for name, value in saved if kind in name} == {torch.float32}
    assert read_metrics(result.folder.metrics).train[-1].loss < 6
    (events,) = (path.read_bytes() for path in result.folder.tensorboard.iterdir())
    assert b"loss/train" in events
    assert b"loss/validation" in events


def test_observers_hear_everything_in_order(make_config: MakeConfig) -> None:
    listener = Listener()
    config = make_config(steps=5, eval_interval=3, checkpoint_interval=2, keep_checkpoints=2)
    result = train(config, observers=[listener])
    assert ", ".join(listener.events) == (
        "records to 2, checkpoint 2, records to 3, validation, "
        "records to 4, checkpoint 4, records to 5, validation, checkpoint 5, finished 5"
    )
    timed = [(1, False), (2, False), (3, True), (4, True), (5, True)]
    assert [(r.step, r.timed) for r in listener.records] == timed
    assert all(r.seconds > 0 for r in listener.records)
    kept = list_checkpoints(result.folder.checkpoints)
    assert [path.name for path in kept] == ["step_00000004", "step_00000005"]


def test_schedule_warms_up_then_falls_linearly(make_config: MakeConfig) -> None:
    config = make_config(learning_rate=1.0, min_lr_ratio=0.2, warmup_steps=10, steps=109)
    wanted = {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.8, 60: 0.6, 109: 0.208}
    assert {step: learning_rate(step, config) for step in wanted} == pytest.approx(wanted)
    falling = [learning_rate(step, config) for step in range(10, 110)]
    assert falling == sorted(falling, reverse=True)
    for warmup in (0, 5, 9):
        config = make_config(learning_rate=1.0, min_lr_ratio=0.0, warmup_steps=warmup, steps=5)
        rates = [learning_rate(step, config) for step in range(1, 6)]
        assert all(0 <= rate <= 1 for rate in rates)
        assert rates[-1] == pytest.approx({0: 1 / 6, 5: 1.0, 9: 5 / 9}[warmup])


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_recipes_agree_with_high_precision(make_config: MakeConfig, compiled: bool) -> None:
    config = make_config(
        device="cuda", compile=compiled, steps=60, accumulate=2, eval_interval=30, log_interval=20
    )
    assert config.dtype == "bfloat16"
    recipes = ["tensorwise", "delayed", *["tensorwise+head+activations"] * compiled]
    rows = compare(config, recipes)["runs"]
    assert [row["status"] for row in rows] == ["finished"] * (2 + len(recipes)), rows
    for row in rows:
        losses = [r.loss for r in read_metrics(Path(config.output) / row["metrics"]).train]
        assert losses[-1] < losses[0] - 1.5
        assert abs(row["val_gap_percent"]) < 5
        assert row["peak_memory_bytes"]
        assert row["tokens_per_s"]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "fp7"}, r"fp7.*tensorwise.*high_precision"),
        ({"model": "huge"}, "unknown model 'huge': choose one of tiny"),
        ({"dtype": "float16"}, "unknown dtype 'float16': choose one of float32, bfloat16"),
        ({"device": "banana"}, "unknown device 'banana'"),
        ({"device": "cuda:99"}, "is not there"),
        ({"device": "cpu:7"}, "device 'cpu:7' is not there"),
        *(
            ({name: value}, f"{name}: got {value}, expected ")
            for name in ("learning_rate", "min_lr_ratio", "weight_decay", "grad_clip")
            for value in (math.inf, -math.inf, math.nan, -1.0)
        ),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0, expected more: with it nothing is trai"),
        ({"recipe": "tensorwise+only"}, r"tensorwise\+only.* do not train: leave \+only out"),
    ],
)
def test_settings_that_cannot_work_are_named(
    make_config: MakeConfig, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**settings)


def test_defaults(make_config: MakeConfig) -> None:
    assert [recipe.value for recipe in Float8LinearRecipeName] == RECIPES
    config = TrainConfig.create(device="cpu")
    assert (config.recipe, config.output) == ("tensorwise", "runs/tiny-tensorwise")
    assert train(make_config(seed=2**63 - 1, steps=1)).step == 1  # the largest


def test_threads_of_a_cpu(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [make_config(model=model).threads for model in ("tiny", "150m")] == [1, 0]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert make_config(model="tiny").threads == 0
    assert make_config(model="tiny", threads=3).threads == 3
    try:
        train(make_config(steps=1, threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_commit_is_dirty_with_any_change_to_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    module = tmp_path / "src" / "float8_lab" / "trainer" / "environment.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    monkeypatch.setattr(environment, "__file__", str(module))
    git("init")
    assert git_commit() is None  # not a part of the repository, as an installed package
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("not the source")
    assert git_commit() == commit
    new = tmp_path / "src" / "float8" / "new.py"
    new.parent.mkdir()
    new.write_text("")
    assert git_commit() == f"{commit}-dirty"
    new.unlink()
    module.write_text("changed")
    assert git_commit() == f"{commit}-dirty"
    monkeypatch.setenv("FLOAT8_COMMIT", "told")
    assert git_commit() == "told"


def test_environment_says_where_but_nothing_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["/home/me/bin/float8", "compare", "/home/me/secret/text", f"{tmp_path}/a", "--steps"]
    monkeypatch.setattr(sys, "argv", words)
    environment = describe_environment(torch.device("cpu"))
    assert environment["torch"] == torch.__version__
    assert environment["device_type"] == "cpu"
    assert environment["device"]
    for name in ("transformers", "peft", "torchao"):  # those that are installed
        installed = pytest.importorskip(name).__version__ if find_spec(name) else None
        assert environment.get(name) == installed
    assert environment["command"] == "float8 compare .../text a --steps"
