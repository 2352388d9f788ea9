"""Settings: what cannot work is named, and they survive being saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest

from float8_lab.errors import ConfigError
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
        ({"device": "cpu:7"}, "device 'cpu:7' is not there"),
        ({"tp": 4}, "--tp got 4, expected a divisor of the 2 key/value heads: use one of 1, 2"),
        ({"tp": 2, "sequence_parallel": True, "seq_len": 15}, "got 2, .*divisor of the 15 tokens"),
        ({"sequence_parallel": True}, "--sequence-parallel is for tensor parallel: add --tp N"),
        ({"hsdp": 2}, "--hsdp is for sharded models: add --fsdp"),
        ({"tp": 2, "fsdp_float8_all_gather": True, "recipe": "delayed"}, "add --fsdp"),
        ({"fsdp_float8_all_gather": True}, "--fsdp-float8-all-gather needs weights in float8"),
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
    with pytest.raises(ConfigError, match=r"saved settings are not of this float8.*colour"):
        TrainConfig.from_dict({**asdict(config), "colour": "red"})


def test_the_largest_seed_works(make_config: MakeConfig) -> None:
    assert train(make_config(seed=2**63 - 1, steps=1)).step == 1
