"""Settings: what cannot work is named, and they survive being saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import pytest

from float8_lab.errors import (
    ConfigError,
)
from float8_lab.trainer.config import TrainConfig
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
        ({"device": "meta"}, "not supported"),
        ({"device": "cpu:7"}, "device 'cpu:7' is not there: .*use cpu"),
        ({"learning_rate": math.inf}, "--learning-rate must be a finite number, got inf"),
        ({"learning_rate": math.nan}, "--learning-rate must be a finite number, got nan"),
        ({"weight_decay": math.inf}, "--weight-decay must be a finite number"),
        ({"grad_clip": math.nan}, "--grad-clip must be a finite number"),
        ({"seed": 2**63}, f"--seed must be a number that fits 64 bits, got {2**63}"),
        ({"batch_size": 2**63}, "--batch-size must be a number that fits 64 bits"),
        ({"steps": 10**30}, "--steps must be a number that fits 64 bits"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"accumulate": 0}, "--accumulate must be at least 1"),
        ({"learning_rate": -1.0}, "--learning-rate must be more than 0"),
        ({"min_lr_ratio": 2.0}, "--min-lr-ratio must be between 0 and 1"),
        ({"vocab_size": 17}, "at least 256"),
        ({"tp": 4}, "--tp got 4, expected a divisor of the 2 key/value heads: use one of 1, 2"),
        ({"tp": 2, "sequence_parallel": True, "seq_len": 15}, "got 2, .*divisor of the 15 tokens"),
        ({"tp": 2, "fsdp_float8_all_gather": True, "recipe": "delayed"}, "add --fsdp"),
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
    assert TrainConfig.from_dict(asdict(config)) == config
    with pytest.raises(ConfigError, match="different version of float8: colour"):
        TrainConfig.from_dict({**asdict(config), "colour": "red"})


def test_settings_of_before_ranks_could_share_layers(make_config: MakeConfig) -> None:
    saved = asdict(config := make_config(recipe="delayed"))
    del saved["tp"], saved["sequence_parallel"]
    assert TrainConfig.from_dict(saved) == config


@pytest.mark.parametrize("saved", [None, [], "text", 3])
def test_saved_settings_that_are_no_settings_are_refused(saved: object) -> None:
    with pytest.raises(ConfigError, match="the saved settings are a"):
        TrainConfig.from_dict(saved)  # type: ignore[arg-type]


def test_saved_settings_of_a_wrong_type_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="the saved settings hold a value of a wrong type"):
        TrainConfig.from_dict({**asdict(make_config()), "steps": "many"})


def test_the_largest_seed_works(make_config: MakeConfig) -> None:
    assert train(make_config(seed=2**63 - 1, steps=1)).summary.steps == 1
