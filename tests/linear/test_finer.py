"""Scales finer than one per tensor: what they keep, take and refuse; `test_values`: results."""

import pytest
import torch

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
)
from support.configs import FINER, mixed, of_recipe
from support.devices import on_devices
from support.models import forward_backward, seeded

ROWS, RUNS = (
    CastConfig(scaling_granularity=each)
    for each in (ScalingGranularity.AXISWISE, ScalingGranularity.BLOCK_1x128)
)


@on_devices
@pytest.mark.parametrize("recipe", FINER)
def test_zeros_and_what_is_not_finite(recipe: str, device: str) -> None:
    layer = Float8Linear(256, 48, False, device, config=of_recipe(recipe))
    x, g = seeded(0, 160, 256, device=device), seeded(1, 160, 48, device=device)
    x[5] = 0
    x[:, 7] = 0
    got = forward_backward(layer, x, g)
    assert (got["output"][5] == 0).all()
    assert (got["weight"][:, 7] == 0).all()
    assert all(t.isfinite().all() for t in got.values())
    x[9, 11] = torch.inf
    got = forward_backward(layer, x, g)
    assert got["output"][9].isnan().all()
    assert got["output"].isfinite().all(dim=1).sum() == 159  # its own row alone
    # In high precision an Inf stays one.
    assert not got["weight"][:, 11].isfinite().any()


def test_a_granularity_of_one_cast_is_named() -> None:
    config = mixed(ROWS, CastConfig(), CastConfig(target_dtype=torch.float8_e5m2))
    assert config.short_str().startswith("input=axiswise/e4m3, weight=dynamic/e4m3")


def test_configurations_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"AXISWISE with ScalingType.DELAYED, expected TENSOR"):
        CastConfig(ScalingType.DELAYED, ScalingGranularity.AXISWISE)
    with pytest.raises(ValueError, match=r"'output'.*axiswise and block_1x128, expected one of"):
        Float8LinearConfig(cast_config_input=ROWS, cast_config_weight=RUNS)
    with pytest.raises(ValueError, match=r"BLOCK_1x128 with ScalingType.DISABLED, expected TENSOR"):
        CastConfig(ScalingType.DISABLED, ScalingGranularity.BLOCK_1x128)
    for cast, name in ((ROWS, "AXISWISE"), (RUNS, "BLOCK_1x128")):  # the gathered bytes fit not
        with pytest.raises(ValueError, match=rf"got True with a weight under .*{name}"):
            mixed(cast, cast, cast, enable_fsdp_float8_all_gather=True)
