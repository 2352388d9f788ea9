"""Configurations that tests are parametrized over."""

import dataclasses
import itertools
from typing import Any

import pytest

from float8 import CastConfig, Float8LinearConfig, ScalingType

DYNAMIC = CastConfig(scaling_type=ScalingType.DYNAMIC)
DELAYED = CastConfig(scaling_type=ScalingType.DELAYED)
DISABLED = CastConfig(scaling_type=ScalingType.DISABLED)


def mixed(input: CastConfig, weight: CastConfig, grad_output: CastConfig, **more: Any):
    """A configuration by the scaling of its three roles."""
    return Float8LinearConfig(
        cast_config_input=input,
        cast_config_weight=weight,
        cast_config_grad_output=grad_output,
        **more,
    )


def tensorwise(**more: Any) -> Float8LinearConfig:
    return mixed(DYNAMIC, DYNAMIC, DYNAMIC, **more)


def delayed(**more: Any) -> Float8LinearConfig:
    return mixed(DELAYED, DELAYED, DELAYED, **more)


def of_recipe(name: str, **more: Any) -> Float8LinearConfig:
    return dataclasses.replace(Float8LinearConfig.from_recipe_name(name), **more)


MIXES = [
    pytest.param(mix, id="-".join(cast.scaling_type.value[:3] for cast in mix))
    for mix in itertools.product((DYNAMIC, DELAYED), repeat=3)
]
"""The 8 ways to scale input, weight and grad_output: `mixed(*mix)`."""

BOTH = pytest.mark.parametrize("config", [tensorwise(), delayed()], ids=["dynamic", "delayed"])

RECIPES = ["tensorwise", "delayed"]
"""With one scale per tensor."""

FINER = ["rowwise", "rowwise_with_gw_hp", "blockwise"]
