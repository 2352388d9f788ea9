"""Settings: what cannot work is named, and they survive being saved; where a result was made."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from float8 import Float8LinearRecipeName
from float8_lab.errors import ConfigError
from float8_lab.trainer import environment
from float8_lab.trainer.config import RECIPES, TrainConfig
from float8_lab.trainer.environment import describe_environment, git_commit
from float8_lab.trainer.loop import train

MakeConfig = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "fp7"}, r"fp7.*tensorwise.*high_precision"),
        ({"model": "huge"}, "unknown model 'huge': choose one of tiny"),
        ({"dtype": "float16"}, "unknown dtype 'float16': choose one of float32, bfloat16"),
        ({"device": "banana"}, "unknown device 'banana'"),
        ({"device": "cuda:99"}, "is not there"),
        ({"device": "cpu:7"}, "device 'cpu:7' is not there"),
        ({"compile": True, "cuda_graphs": True}, "--cuda-graphs got --device cpu; expected"),
        ({"cuda_graphs": True}, "--device cpu, no --compile; expected"),
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
    train(make_config(steps=1, threads=2))
    assert torch.get_num_threads() == 2


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
    assert environment["command"] == "float8 compare .../text a --steps"
